"""Checkpoints between Hugging Face folders, Orbax folders and our parameters."""

import os
from pathlib import Path

from jax.sharding import Sharding
from jax.typing import DTypeLike

from convert.conversion import convert, open_source, save_hf, save_orbax
from convert.hf import load_hf
from convert.orbax import is_orbax, restore
from convert.source import read_model
from models.transformer import Params, Transformer

__all__ = ["convert", "load", "load_hf", "open_source", "read_model", "restore", "save_hf", "save_orbax"]


def load(
    folder: str | os.PathLike[str], shardings: Sharding | Params | None = None, *, dtype: DTypeLike | None = None
) -> tuple[Transformer, Params]:
    """Loads a folder of either kind; see `load_hf` and `restore`."""
    return (restore if is_orbax(Path(folder)) else load_hf)(folder, shardings, dtype=dtype)
