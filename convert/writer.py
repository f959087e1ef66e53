"""Writes the weights of a Hugging Face folder: safetensors shards and their index, one tensor at a time."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from convert.aside import write_json
from convert.shards import INDEX, SINGLE
from convert.source import Source

SHARD_BYTES = 5 * 10**9
"""Largest shard, as the Hub's own tools cut; a larger tensor is a shard of its own."""

_NAMES = {"float32": "F32", "bfloat16": "BF16"}


def shard_files(source: Source, limit: int | None = None) -> dict[str, list[str]]:
    """The dotted paths of every file that a source becomes; None is the usual limit."""
    limit = limit or SHARD_BYTES
    shards: list[list[str]] = [[]]
    size = 0
    for path in source.leaves:
        if shards[-1] and size + source.size(path) > limit:
            shards.append([])
            size = 0
        shards[-1].append(path)
        size += source.size(path)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": paths for i, paths in enumerate(shards, 1)}


def write_weights(folder: Path, source: Source, progress: Callable[[str, int], None], limit: int | None = None) -> None:
    """Writes the shards and, if there are several, their index; whole shards that are already there are kept.

    Raises:
      ValueError: the source is damaged.
      OSError: the folder cannot be written.
    """
    files = shard_files(source, limit)
    for name, paths in files.items():
        if (folder / name).is_file():
            for path in paths:
                progress(path, source.size(path))
        else:
            _write_shard(folder / name, source, paths, progress)
    if len(files) > 1:
        places = {source.naming.source(path): name for name, paths in files.items() for path in paths}
        total = sum(map(source.size, source.leaves))
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def _write_shard(file: Path, source: Source, paths: list[str], progress: Callable[[str, int], None]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for path in paths:
        starts[path], end = end, end + source.size(path)
        header[source.naming.source(path)] = {
            "dtype": _NAMES[source.config.dtype],
            "shape": list(source.leaves[path].shape),
            "data_offsets": [starts[path], end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    new = file.with_name(f".{file.name}.new")
    with new.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        for path, values in source.read(paths):
            stream.seek(8 + len(encoded) + starts[path])
            stream.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            progress(path, source.size(path))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)
