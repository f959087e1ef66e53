"""A checkpoint that can be read tensor by tensor, whatever it is stored as."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from convert.names import DREAM, LLADA, LLAMA, Naming, flatten
from convert.shards import read_json
from models import dream, llada
from models.transformer import Config, Params, Transformer

FAMILIES = {"llada": (llada, (LLADA, LLAMA)), "Dream": (dream, (DREAM,))}
"""By `model_type`: the module of its config, and the names that its tensors may have."""

DTYPES = ("float32", "bfloat16")
CONFIG = "config.json"

Read = Callable[[Iterable[str]], Iterator[tuple[str, np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter where it is stored: its name there, its shape and its dtype in NumPy's words."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint whose config, names, shapes and dtypes have all been checked, and whose values are still unread.

    Attributes:
      config: of the model; its dtype is the one that `read` yields.
      fields: the content of `config.json`.
      naming: the names that its tensors have, or would have, in a Hugging Face folder.
      leaves: every parameter, by dotted path, in the order of the model.
      read: yields the values of some dotted paths as NumPy arrays, one at a time, in the order of the files.
      folder: where it lies; None for parameters in memory.
      files: those that hold `leaves`, relative to `folder`.
      ignored: names of stored tensors that are no parameters, each with the reason.
    """

    config: Config
    fields: Mapping[str, Any]
    naming: Naming
    leaves: Mapping[str, Leaf]
    read: Read
    folder: Path | None = None
    files: tuple[str, ...] = ()
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def itemsize(self) -> int:
        """Bytes of an element that `read` yields."""
        return jnp.dtype(self.config.dtype).itemsize

    def size(self, path: str) -> int:
        """Bytes of a leaf that `read` yields."""
        return int(np.prod(self.leaves[path].shape)) * self.itemsize

    def fields_out(self) -> dict[str, Any]:
        """`config.json` of a copy: the same fields, with the dtype that `read` yields."""
        key = "dtype" if "dtype" in self.fields else "torch_dtype"
        return {**self.fields, key: self.config.dtype}


def read_model(folder: str | os.PathLike[str]) -> Transformer:
    """The model of a folder of either kind, from its `config.json` alone: shapes and ids, not the weights' dtype.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it is damaged, or of a model that cannot be loaded.
    """
    return Transformer(read_config(existing_folder(folder))[0])


def places_of(abstract: Params, shardings: Sharding | Params) -> dict[str, Sharding]:
    """Where each dotted path goes: one sharding for all, or a tree of them like the parameters."""
    return dict.fromkeys(flatten(abstract), shardings) if isinstance(shardings, Sharding) else flatten(shardings)


def from_params(model: Transformer, params: Params) -> Source:
    """Parameters in memory as a source.

    Raises:
      ValueError: the parameters are not those of the model, or its dtype is not one of theirs.
    """
    expected, leaves = flatten(model.abstract_params()), flatten(params)
    problems = [f"missing: {path}" for path in expected.keys() - leaves.keys()]
    problems += [f"unexpected: {path}" for path in leaves.keys() - expected.keys()]
    problems += [
        f"shape: {path} is {list(leaf.shape)}, the model's config makes it {list(expected[path].shape)}"
        for path, leaf in leaves.items()
        if path in expected and leaf.shape != expected[path].shape
    ]
    if problems:
        raise ValueError("these are not the parameters of this model:\n  " + "\n  ".join(sorted(problems)))
    family, (naming, *_) = family_of(model.config)
    dtype = jnp.dtype(model.config.dtype)

    def read(paths: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        for path in paths:
            yield path, np.asarray(leaves[path]).astype(dtype, copy=False)

    return Source(
        config=model.config,
        fields=family.write_config(model.config),
        naming=naming,
        leaves={path: Leaf(path, leaves[path].shape, jnp.dtype(leaves[path].dtype).name) for path in expected},
        read=read,
    )


def family_of(config: Config) -> tuple[ModuleType, tuple[Naming, ...]]:
    """The entry of `FAMILIES` that a config belongs to."""
    return next(family for kind, family in FAMILIES.items() if kind.lower() == config.family)


def read_config(folder: Path) -> tuple[Config, dict[str, Any], tuple[Naming, ...]]:
    """The config of a folder, checked against its own vocabulary; its fields; the names that its tensors may have.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: it is damaged, of another family, or says what this implementation lacks.
    """
    file = folder / CONFIG
    fields = read_json(file)
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        known = " and ".join(map(repr, FAMILIES))
        raise ValueError(f"{file} says model_type={kind!r}: only checkpoints of {known} can be loaded")
    family, namings = FAMILIES[kind]
    try:
        config = family.read_config(fields)
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
    return config, fields, namings


def dtype_name(dtype: DTypeLike) -> str:
    """The name of a parameter dtype.

    Raises:
      ValueError: it is neither float32 nor bfloat16.
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} must be 'float32' or 'bfloat16'")
    return name


def existing_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder as a path.

    Raises:
      FileNotFoundError: it is not there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the path of a downloaded Hugging Face checkpoint")
    return folder
