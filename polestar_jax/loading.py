"""Checkpoints by name or by folder: the one place where the library reaches for `models` and `convert`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh
from jax.typing import DTypeLike

from polestar_jax.types import Model

if TYPE_CHECKING:
    from polestar_jax.tokenizer import Tokenizer

_ROOT = Path(__file__).resolve().parents[1]
_EMBEDDED = _ROOT / "models" / "embedded"


def embedded_names() -> list[str]:
    """Names of the checkpoints that come with the package, for `load`."""
    return sorted(path.parent.name for path in _EMBEDDED.glob("*/config.json"))


def load(
    name_or_dir: str | Path, *, dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> tuple[Model, Any, "Tokenizer | None"]:
    """Loads a checkpoint: model, parameters, tokenizer.

    Args:
      name_or_dir: an embedded name such as `"polestar-tiny"`, or the path of a Hugging Face folder or of an Orbax
        folder that `polestar convert` made. A folder that has an embedded name is reached as `"./polestar-tiny"`.
      dtype: of the parameters, float32 or bfloat16; None keeps that of the file.
      mesh: with axes "data" and "model", over which the parameters are spread as `polestar_jax.placement` has it, each
        part straight to its devices; give it to `decode.init` too. None is one device.

    Returns:
      The model, its parameters, and the folder's tokenizer (`polestar_jax.tokenizer.Tokenizer`: text and chats to ids
      and back), or None where there is none: prompts are then given as ids.

    Raises:
      FileNotFoundError: there is no such name or folder, or a file is missing from it.
      ValueError: files are damaged or do not fit each other; the message lists every offender.
      ImportError: another package called `models` or `convert` hides ours.
    """
    convert = import_ours("convert")
    from polestar_jax.placement import param_shardings
    from polestar_jax.tokenizer_files import read_tokenizer

    folder = _EMBEDDED / name_or_dir if name_or_dir in embedded_names() else Path(name_or_dir)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{str(name_or_dir)!r} is neither an embedded checkpoint ({', '.join(embedded_names()) or 'none is built'})"
            " nor a folder: give the path of a downloaded Hugging Face folder, nothing is downloaded from here"
        )
    # Whatever does not fit is said before gigabytes are read.
    model = convert.read_model(folder)
    tokenizer = read_tokenizer(folder, model.config)
    shardings = None if mesh is None else param_shardings(model, mesh)
    return *convert.load(folder, shardings, dtype=dtype), tokenizer


def import_ours(package: str) -> Any:
    """One of the packages that come beside `polestar_jax`, `models` or `convert`.

    Raises:
      ImportError: another package of that name, or of the other's, hides it.
    """
    for name in ("models", "convert"):
        _require_ours(name)
    return importlib.import_module(package)


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
