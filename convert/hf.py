"""Hugging Face folders as a source, and `(model, params)` from them: strict, without torch or code from the folder."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from convert.names import choose, flatten, unflatten
from convert.shards import INDEX, SINGLE, Entry, read, scan
from convert.source import Leaf, Source, dtype_name, existing_folder, places_of, read_config
from models.transformer import Config, Params, Transformer

_WEIGHT_DTYPES = {"F32": "float32", "BF16": "bfloat16"}
_HALF = "F16"


def open_hf(folder: str | os.PathLike[str], *, dtype: DTypeLike | None = None) -> Source:
    """Checks config, names, shapes and dtypes of a Hugging Face folder, before the first weight is read.

    Args:
      folder: holds `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`. Tensors may
        have LLaDA's own names, the LLaMA-like ones of LLaDA-V, or Dream's.
      dtype: to read weights as, float32 or bfloat16; None keeps that of the file.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or config and tensors do not fit; the message lists every offender.
    """
    folder = existing_folder(folder)
    wanted = None if dtype is None else dtype_name(dtype)
    config, fields, namings = read_config(folder)
    entries, problems = scan(folder)
    abstract = flatten(Transformer(config).abstract_params())
    naming = choose(namings, abstract, entries)
    names = {path: naming.source(path) for path in abstract}
    expected = {names[path]: leaf.shape for path, leaf in abstract.items()}
    tied_head = entries.get(naming.source("head.weight")) if config.tied else None
    if tied_head:
        expected[tied_head.name] = abstract["embedding"].shape
    tables = (naming.source("embedding"), naming.source("head.weight"))
    ignored = {name: "a buffer" for name in entries if name not in expected and naming.ignores(name)}
    weights = {name: entry for name, entry in entries.items() if name not in ignored}
    problems += _problems(naming.title, tables, weights, expected, config)
    stored = [entries[name] for name in expected if name in entries]
    problems += _dtype_problems(stored, wanted)
    if problems:
        listing = "\n  ".join(problems)
        raise ValueError(f"{folder} cannot be loaded, its tensors do not fit its config.json:\n  {listing}")
    if tied_head:
        _check_tied(folder, entries[names["embedding"]], tied_head)
        ignored[tied_head.name] = "equal to the embedding, which the head is tied to"

    config = dataclasses.replace(config, dtype=wanted or _WEIGHT_DTYPES[stored[0].dtype])
    paths = {name: path for path, name in names.items()}

    def cast(stored: tuple[Entry, np.ndarray]) -> tuple[str, np.ndarray]:
        # Cast on the host: the device then never holds a weight in two dtypes.
        return paths[stored[0].name], stored[1].astype(jnp.dtype(config.dtype), copy=False)

    def values(some: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        # Not a loop, whose variable would keep a tensor while the next one is read.
        return map(cast, read(entries[names[path]] for path in some))

    leaves = {path: _leaf(entries[name]) for path, name in names.items()}
    shards = sorted({entry.file.name for entry in entries.values()})
    return Source(
        config=config,
        fields=fields,
        naming=naming,
        leaves=leaves,
        read=values,
        folder=folder,
        files=tuple(shards if shards == [SINGLE] else [*shards, INDEX]),
        ignored=ignored,
    )


def load_hf(
    folder: str | os.PathLike[str], shardings: Sharding | Params | None = None, *, dtype: DTypeLike | None = None
) -> tuple[Transformer, Params]:
    """Loads a LLaDA or Dream checkpoint from a Hugging Face folder.

    Weights are read one tensor at a time, so that host memory beyond the result stays near the largest tensor.

    Args and errors are those of `open_hf`, and:
      shardings: where the parameters go: one sharding for all, or a tree of them like the parameters. Every tensor goes
        to its devices before the next one is read. None is the first device.

    Returns:
      The model, and its parameters as the nested dict of `model.abstract_params()`, weights `[out, in]`.
    """
    source = open_hf(folder, dtype=dtype)
    model = Transformer(source.config)
    abstract = model.abstract_params()
    places = None if shardings is None else places_of(abstract, shardings)

    def place(path: str, values: np.ndarray) -> jax.Array:
        if places is None:
            return jnp.asarray(values)
        # Part by part, so that of several processes each takes its own; ready, so that the host can let go of it.
        return jax.make_array_from_callback(values.shape, places[path], values.__getitem__).block_until_ready()

    return model, unflatten(abstract, {path: place(path, values) for path, values in source.read(source.leaves)})


def _leaf(entry: Entry) -> Leaf:
    return Leaf(entry.name, entry.shape, _WEIGHT_DTYPES.get(entry.dtype, "float16"))


def _check_tied(folder: Path, embedding: Entry, head: Entry) -> None:
    """Refuses a head that config.json ties to the embedding and that the file has with other values."""
    values = {entry.name: array for entry, array in read([embedding, head])}
    # Compared as stored, a row block at a time: NumPy widens bfloat16 to compare it.
    for start in range(0, embedding.shape[0], 4096):
        rows = [values[name][start : start + 4096].astype(np.float32) for name in (embedding.name, head.name)]
        if not np.array_equal(*rows, equal_nan=True):
            raise ValueError(
                f"{folder}: config.json ties the head to the embedding, but {head.name} differs from"
                f" {embedding.name}: set weight_tying (Dream: tie_word_embeddings) to false in config.json if the head"
                " was trained"
            )


def _problems(
    title: str,
    tables: tuple[str, str],
    entries: Mapping[str, Entry],
    expected: Mapping[str, tuple[int, ...]],
    config: Config,
) -> list[str]:
    """A line for every tensor that is missing, unexpected or of another shape than the config asks for."""
    problems = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in entries]
    for name, entry in entries.items():
        if name not in expected:
            problems.append(f"unexpected: {name} {list(entry.shape)} is no tensor of a {title} checkpoint")
        elif name in tables and entry.shape[1:] == expected[name][1:] and entry.shape != expected[name]:
            problems.append(
                f"vocabulary: {name} has {entry.shape[0]} rows, config.json says {config.vocab_size}"
                " (embedding_size, or else vocab_size)"
            )
        elif entry.shape != expected[name]:
            problems.append(f"shape: {name} is {list(entry.shape)}, config.json makes it {list(expected[name])}")
    return problems


def _dtype_problems(entries: list[Entry], wanted: str | None) -> list[str]:
    """A line for every tensor whose dtype cannot be loaded as `wanted`, or cannot be kept when that is None."""
    readable = {*_WEIGHT_DTYPES, _HALF}
    problems = [
        f"dtype: {entry.name} is {entry.dtype}: quantized or integer weights cannot be loaded, use the original"
        " float32 or bfloat16 checkpoint"
        for entry in entries
        if entry.dtype not in readable
    ]
    kinds = {kind: [entry.name for entry in entries if entry.dtype == kind] for kind in readable}
    kinds = {kind: names for kind, names in kinds.items() if names}
    if wanted is None and kinds and (len(kinds) > 1 or _HALF in kinds):
        usual = max(kinds, key=lambda kind: len(kinds[kind]) if kind in _WEIGHT_DTYPES else -1)
        problems += [
            f"dtype: {name} is {kind}: pass dtype='float32' or 'bfloat16' to convert all tensors to it"
            for kind, names in kinds.items()
            if kind != usual or kind == _HALF
            for name in names
        ]
    return problems
