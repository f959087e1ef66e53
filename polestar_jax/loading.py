"""Checkpoints by name or by folder: the one place where the library reaches for `models` and `convert`."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike
from tokenizers import Tokenizer

from polestar_jax.types import Model

_ROOT = Path(__file__).resolve().parents[1]
_EMBEDDED = _ROOT / "models" / "embedded"


def embedded_names() -> list[str]:
    """Names of the checkpoints that come with the package, for `load`."""
    return sorted(path.parent.name for path in _EMBEDDED.glob("*/config.json"))


def load(name_or_dir: str | Path, *, dtype: DTypeLike | None = None) -> tuple[Model, Any, Tokenizer | None]:
    """Loads a checkpoint: model, parameters, tokenizer.

    Args:
      name_or_dir: an embedded name such as `"polestar-tiny"`, or the path of a Hugging Face folder. A folder that has
        an embedded name is reached as `"./polestar-tiny"`.
      dtype: of the parameters, float32 or bfloat16; None keeps that of the file.

    Returns:
      The model, its parameters, and the tokenizer of `tokenizer.json`, or None where the folder has none: prompts are
      then given as ids.

    Raises:
      FileNotFoundError: there is no such name or folder, or a file is missing from it.
      ValueError: files are damaged or do not fit each other; the message lists every offender.
      ImportError: another package called `models` or `convert` hides ours.
    """
    for package in ("models", "convert"):
        _require_ours(package)
    from convert import load_hf

    folder = _EMBEDDED / name_or_dir if name_or_dir in embedded_names() else Path(name_or_dir)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{str(name_or_dir)!r} is neither an embedded checkpoint ({', '.join(embedded_names()) or 'none is built'})"
            " nor a folder: give the path of a downloaded Hugging Face folder, nothing is downloaded from here"
        )
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    model, params = load_hf(folder, dtype=dtype)
    if tokenizer is not None:
        largest = max(tokenizer.get_vocab().values(), default=0)
        if largest >= model.config.vocab_size:
            raise ValueError(
                f"{folder / 'tokenizer.json'} has ids up to {largest}, the model's vocabulary ends before"
                f" {model.config.vocab_size}: use the tokenizer of this checkpoint"
            )
    return model, params, tokenizer


def _read_tokenizer(file: Path) -> Tokenizer | None:
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{file} cannot be read as a tokenizer ({error}): download it again") from error


def _require_ours(package: str) -> None:
    """Refuses a top-level package that is not the one installed beside `polestar_jax`, before any of its code runs."""
    loaded = sys.modules.get(package)
    if loaded is None:
        spec = importlib.util.find_spec(package)
        found, places = (None, None) if spec is None else (spec.origin, spec.submodule_search_locations)
    else:
        found, places = getattr(loaded, "__file__", None), getattr(loaded, "__path__", None)
    found = found or next(iter(places or ()), "nothing on disk")
    ours = _ROOT / package / "__init__.py"
    if Path(found).resolve() != ours:
        raise ImportError(
            f"`import {package}` finds {found} instead of {ours}, which polestar_jax needs to load a"
            " checkpoint: rename that file or folder or start Python elsewhere, in a fresh process if it was imported"
        )
