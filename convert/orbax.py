"""Orbax folders: config and tokenizer files beside `params/`, a checkpoint that plain Orbax restores.

`params/` is written piece by piece with Orbax's partial saving, so that memory holds one piece, and a stopped
conversion goes on behind its last whole piece. Keys of layers are strings on disk, `{"layers": {"0": ...}}`.

Orbax is imported where it is used: who loads a Hugging Face folder does not wait for it.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from convert.names import flatten, unflatten
from convert.shards import read_json
from convert.source import Leaf, Source, dtype_name, existing_folder, places_of, read_config
from models.transformer import Params, Transformer

PARAMS = "params"
RECORD = "conversion.json"

_PIECE = 256 << 20  # bytes that are saved at once; a larger tensor is a piece of its own
_CHUNK = 64 << 20  # bytes of a stored chunk: what a device reads at least of a tensor that is split over devices
_MERGING = ".merging"

Progress = Callable[[str, int], None]
"""Called with a dotted path and its bytes whenever a tensor is on disk."""


def is_orbax(folder: Path) -> bool:
    """Whether a folder holds an Orbax checkpoint rather than a Hugging Face one."""
    return (folder / PARAMS).is_dir()


def restore(
    folder: str | os.PathLike[str], shardings: Sharding | Params | None = None, *, dtype: DTypeLike | None = None
) -> tuple[Transformer, Params]:
    """Restores an Orbax folder.

    Args:
      folder: what `convert` or `save_orbax` wrote.
      shardings: where the parameters go: one sharding for all, or a tree of them like the parameters; each device
        then reads its own part only. None is the first device.
      dtype: of the parameters, float32 or bfloat16; None keeps that of the checkpoint.

    Returns:
      The model, and its parameters as the nested dict of `model.abstract_params()`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or config and checkpoint do not fit; the message lists every offender.
    """
    source = open_orbax(folder, dtype=dtype)
    model = Transformer(source.config)
    abstract = model.abstract_params()
    if shardings is None:
        shardings = SingleDeviceSharding(jax.devices()[0])
    places = places_of(abstract, shardings)
    wanted = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[path])
        for path, leaf in flatten(abstract).items()
    }
    return model, unflatten(abstract, flatten(_load(Path(folder) / PARAMS, wanted)))


def open_orbax(folder: str | os.PathLike[str], *, dtype: DTypeLike | None = None) -> Source:
    """Checks config, names, shapes and dtypes of an Orbax folder, before the first weight is read.

    Args and errors are those of `restore`.
    """
    folder = existing_folder(folder)
    wanted = None if dtype is None else dtype_name(dtype)
    config, fields, namings = read_config(folder)
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    naming = next((naming for naming in namings if naming.title == record.get("naming")), namings[0])
    from orbax.checkpoint import v1 as ocp

    with _understood(folder / PARAMS):
        stored = flatten(ocp.metadata(_place(folder / PARAMS)).metadata)
    expected = flatten(Transformer(config).abstract_params())
    problems = [f"missing: {path} {list(leaf.shape)}" for path, leaf in expected.items() if path not in stored]
    problems += [f"unexpected: {path} {list(leaf.shape)}" for path, leaf in stored.items() if path not in expected]
    problems += [
        f"shape: {path} is {list(stored[path].shape)}, config.json makes it {list(leaf.shape)}"
        for path, leaf in expected.items()
        if path in stored and stored[path].shape != leaf.shape
    ]
    dtypes = sorted({jnp.dtype(leaf.dtype).name for leaf in stored.values()})
    if not problems and wanted is None:
        problems += [
            f"dtype: {name} is no dtype of parameters" for name in dtypes if name not in ("float32", "bfloat16")
        ]
        if len(dtypes) > 1:
            problems.append(f"dtype: the tensors are {' and '.join(dtypes)}: choose one")
    if problems:
        listing = "\n  ".join(problems)
        raise ValueError(f"{folder} cannot be loaded, its {PARAMS} do not fit its config.json:\n  {listing}")
    config = dataclasses.replace(config, dtype=wanted or dtypes[0])

    def values(some: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        for path in some:
            loaded = flatten(_load(folder / PARAMS, {path: np.ndarray}))
            yield path, loaded[path].astype(jnp.dtype(config.dtype), copy=False)

    return Source(
        config=config,
        fields=fields,
        naming=naming,
        leaves={path: Leaf(path, stored[path].shape, jnp.dtype(stored[path].dtype).name) for path in expected},
        read=values,
        folder=folder,
        files=(f"{PARAMS}/_CHECKPOINT_METADATA",),
    )


def write_params(folder: Path, source: Source, progress: Progress) -> None:
    """Writes `params/` into a folder, continuing what an earlier process began there.

    Raises:
      ValueError: the source is damaged.
      OSError: the folder cannot be written.
    """
    from orbax.checkpoint import v1 as ocp

    target, merging = folder / PARAMS, folder / _MERGING
    if not target.is_dir():
        if merging.exists():  # Orbax cannot continue a merge that was cut off
            shutil.rmtree(_partial(target), ignore_errors=True)
        for unfinished in folder.glob(f"{_partial(target).name}.*"):
            shutil.rmtree(unfinished)
        saved = saved_paths(target)
        for path in saved:
            progress(path, source.size(path))
        for piece in _ahead(_pieces(source, [path for path in source.leaves if path not in saved])):
            with _understood(folder), _writing():
                ocp.partial.save(_place(target), _nest(piece))
            for path in piece:
                progress(path, source.size(path))
            piece.clear()  # else it would stay while the next one is written
        merging.touch()
        with _understood(folder), _writing():
            ocp.partial.finalize(_place(target))
    merging.unlink(missing_ok=True)


def saved_paths(target: Path) -> set[str]:
    """Dotted paths that stopped processes left whole for `target`: Orbax writes a piece's metadata last."""
    paths = set()
    for file in _partial(target).glob("*.pending_*/*/_METADATA"):
        entries = json.loads(file.read_text())["tree_metadata"].values()
        paths |= {".".join(str(key["key"]) for key in entry["key_metadata"]) for entry in entries}
    return paths


def _place(target: Path) -> str:
    return str(target.absolute())  # Orbax takes nothing else


def _partial(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial_save")


def _pieces(source: Source, paths: Iterable[str]) -> Iterator[dict[str, np.ndarray]]:
    piece, size = {}, 0
    for path, values in source.read(paths):
        if piece and size + values.nbytes > _PIECE:
            yield piece
            piece, size = {}, 0
        piece[path] = values
        size += values.nbytes
        del values
    if piece:
        yield piece


def _ahead(pieces: Iterator[dict[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """The pieces, each read while the one before is written."""
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        following = reader.submit(next, pieces, None)
        while (piece := following.result()) is not None:
            following = reader.submit(next, pieces, None)
            yield piece


def _nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of dotted paths, with string keys only."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def _load(target: Path, wanted: Mapping[str, Any]) -> Any:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with _understood(target), context:
        return ocp.load(_place(target), _nest(wanted))


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    saving = context.array.saving
    saving.use_compression = False  # weights do not compress
    saving.enable_write_sharding_file = False  # whoever restores says where parameters go
    saving.storage_options.chunk_byte_size = _CHUNK
    context.memory.deepcopy_host_arrays = False  # nobody changes a piece while it is written
    context.memory.write_concurrent_bytes = _PIECE
    with context:
        yield


@contextlib.contextmanager
def _understood(place: Path) -> Iterator[None]:
    """Turns whatever Orbax raises into an error of one line, and keeps its own traceback off the terminal.

    Raises:
      OSError: the system refused, with its number and words.
      ValueError: anything else.
    """
    logger, hook = logging.getLogger("absl"), sys.unraisablehook
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda problem: None
    try:
        yield
    except Exception as error:  # Orbax raises anything, and TensorStore ValueErrors even for a full disk
        time.sleep(0.2)  # other writes that fail now report to a loop that Orbax has closed
        # Only the number is sure to be there: other facts may stand between it and the system's words.
        system = re.search(r"os_error_code=\\*'(\d+)", str(error))
        if system:
            raise OSError(int(system[1]), os.strerror(int(system[1]))) from error
        if isinstance(error, OSError) and error.errno:
            raise
        raise ValueError(f"{place} is damaged ({str(error).splitlines()[0]})") from error
    finally:
        logger.setLevel(level)
        sys.unraisablehook = hook
