"""Hugging Face folders to `(model, params)`: strict, without torch, without running code from the folder."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from convert.names import DREAM, LLADA, LLAMA, Naming, choose, flatten, unflatten
from convert.shards import Entry, read, read_json, scan
from models import dream, llada
from models.transformer import Config, Params, Transformer

FAMILIES = {"llada": (llada.read_config, (LLADA, LLAMA)), "Dream": (dream.read_config, (DREAM,))}
"""By `model_type`: the reader of its config, and the names that its tensors may have."""

_WEIGHT_DTYPES = {"F32": "float32", "BF16": "bfloat16"}
_HALF = "F16"


def load_hf(folder: str | os.PathLike[str], *, dtype: DTypeLike | None = None) -> tuple[Transformer, Params]:
    """Loads a LLaDA or Dream checkpoint from a Hugging Face folder.

    Config, names, shapes and dtypes are all checked before the first weight is read. Weights are then read one tensor
    at a time, so that host memory beyond the result stays near the largest tensor.

    Args:
      folder: holds `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`. Tensors may
        have LLaDA's own names, the LLaMA-like ones of LLaDA-V, or Dream's.
      dtype: of the parameters, float32 or bfloat16; None keeps that of the file.

    Returns:
      The model, and its parameters as the nested dict of `model.abstract_params()`, weights `[out, in]`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or config and tensors do not fit; the message lists every offender.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the path of a downloaded Hugging Face checkpoint")
    wanted = None if dtype is None else _dtype_name(dtype)
    config, namings = _config(folder, read_json(folder / "config.json"))
    entries, problems = scan(folder)
    abstract = flatten(Transformer(config).abstract_params())
    naming = choose(namings, abstract, entries)
    tied_head = entries.get(naming.source("head.weight")) if config.tied else None
    if tied_head:
        abstract["head.weight"] = abstract["embedding"]
    sources = {naming.source(path): path for path in abstract}
    problems += _problems(naming, entries, {name: abstract[path].shape for name, path in sources.items()}, config)
    stored = [entries[name] for name in sources if name in entries]
    problems += _dtype_problems(stored, wanted)
    if problems:
        listing = "\n  ".join(problems)
        raise ValueError(f"{folder} cannot be loaded, its tensors do not fit its config.json:\n  {listing}")

    config = dataclasses.replace(config, dtype=wanted or _WEIGHT_DTYPES[stored[0].dtype])
    model = Transformer(config)
    # Cast on the host: the device then never holds a weight in two dtypes.
    leaves = {
        sources[entry.name]: jnp.asarray(values.astype(jnp.dtype(config.dtype), copy=False))
        for entry, values in read(stored)
    }
    if tied_head and not jnp.array_equal(leaves.pop("head.weight"), leaves["embedding"], equal_nan=True):
        raise ValueError(
            f"{folder}: config.json ties the head to the embedding, but {tied_head.name} differs from"
            f" {naming.source('embedding')}: set weight_tying to false in config.json if the head was trained"
        )
    return model, unflatten(model.abstract_params(), leaves)


def _dtype_name(dtype: DTypeLike) -> str:
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in _WEIGHT_DTYPES.values():
        raise ValueError(f"dtype={name!r} must be 'float32' or 'bfloat16'")
    return name


def _config(folder: Path, fields: Mapping[str, Any]) -> tuple[Config, tuple[Naming, ...]]:
    """The config, checked against its own vocabulary, and the names that the tensors may have."""
    file = folder / "config.json"
    family = fields.get("model_type")
    if family not in FAMILIES:
        known = " and ".join(map(repr, FAMILIES))
        raise ValueError(f"{file} says model_type={family!r}: only checkpoints of {known} can be loaded")
    read_config, namings = FAMILIES[family]
    try:
        config = read_config(fields)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    ids = {"mask_token_id": config.mask_id, "eos_token_id": config.eos_id}
    problems = [
        f"{name}={value} lies outside the vocabulary of {config.vocab_size}"
        for name, value in ids.items()
        if not 0 <= value < config.vocab_size
    ]
    if fields["vocab_size"] > config.vocab_size:
        problems.append(f"embedding_size={config.vocab_size} is less than vocab_size={fields['vocab_size']}")
    if problems:
        raise ValueError(f"{file}: {'; '.join(problems)}: it belongs to another vocabulary than its own sizes say")
    return config, namings


def _problems(
    naming: Naming, entries: Mapping[str, Entry], expected: Mapping[str, tuple[int, ...]], config: Config
) -> list[str]:
    """A line for every tensor that is missing, unexpected or of another shape than the config asks for."""
    problems = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in entries]
    tables = (naming.source("embedding"), naming.source("head.weight"))
    for name, entry in entries.items():
        if name not in expected:
            if not naming.ignores(name):
                problems.append(f"unexpected: {name} {list(entry.shape)} is no tensor of a {naming.title} checkpoint")
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
