"""One checkpoint folder to another: Hugging Face to Orbax and back, tensor by tensor, whole or not at all."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from convert import orbax, writer
from convert.aside import check_target, write_json, written_aside
from convert.hf import open_hf
from convert.source import CONFIG, Source, from_params
from models.transformer import Params, Transformer

FORMATS = ("orbax", "hf")

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"})


def open_source(folder: str | os.PathLike[str], *, dtype: DTypeLike | None = None) -> Source:
    """Checks a folder of either kind; see `open_hf` and `open_orbax`."""
    return (orbax.open_orbax if orbax.is_orbax(Path(folder)) else open_hf)(folder, dtype=dtype)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str = "orbax",
    dtype: DTypeLike | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[str, int], None] = lambda path, size: None,
    started: Callable[[Source], None] = lambda source: None,
) -> dict[str, Any]:
    """Converts a checkpoint folder.

    Everything is checked before the first weight is read. The target appears whole, in one rename, or not at all.
    Files beside the weights (tokenizer, generation defaults, licence) are copied as they are.

    Args:
      source: a Hugging Face or an Orbax folder.
      target: the folder to make.
      to: "orbax" or "hf".
      dtype: of the weights, float32 or bfloat16; None keeps that of the source.
      resume: continue a conversion that was killed.
      overwrite: replace a target that is there.
      progress: called with dotted path and bytes of every tensor that is on disk.
      started: called with the checked source, before anything is written.

    Returns:
      The report, which is also `conversion.json` in the target: every tensor with name, shape, dtype and target.

    Raises:
      FileNotFoundError: a file of the source is missing.
      FileExistsError: the target is there, or an unfinished one is.
      ValueError: the source is damaged, or its parts do not fit each other; the message lists every offender.
      OSError: the target cannot be written.
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r} must be 'orbax' or 'hf'")
    target = Path(os.path.abspath(target))
    check_target(target, overwrite=overwrite)
    checked = open_source(source, dtype=dtype)
    started(checked)
    return _write(target, checked, to, resume=resume, overwrite=overwrite, progress=progress)


def save_hf(
    folder: str | os.PathLike[str],
    model: Transformer,
    params: Params,
    *,
    overwrite: bool = False,
) -> None:
    """Writes parameters as a Hugging Face folder of their family.

    Args:
      folder: to make; it appears whole or not at all.
      model: whose config says dtype and family.
      params: its parameters.
      overwrite: replace a folder that is there.

    Raises:
      ValueError: the parameters are not those of the model.
      OSError: the folder is there, or cannot be written.
    """
    _write(Path(os.path.abspath(folder)), from_params(model, params), "hf", overwrite=overwrite)


def save_orbax(
    folder: str | os.PathLike[str],
    model: Transformer,
    params: Params,
    *,
    overwrite: bool = False,
) -> None:
    """Writes parameters as an Orbax folder; arguments and errors are those of `save_hf`."""
    _write(Path(os.path.abspath(folder)), from_params(model, params), "orbax", overwrite=overwrite)


def _write(
    target: Path,
    source: Source,
    to: str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[str, int], None] = lambda path, size: None,
) -> dict[str, Any]:
    report = _report(source, to)
    with written_aside(target, orbax.RECORD, report, resume=resume, overwrite=overwrite) as folder:
        _check_space(folder, report["bytes"])
        for file in _beside(source):
            shutil.copyfile(file, folder / file.name)
        write_json(folder / CONFIG, source.fields_out())
        (orbax.write_params if to == "orbax" else writer.write_weights)(folder, source, progress)
        if source.folder is None:
            (folder / orbax.RECORD).unlink()  # nothing was converted
    return report


def _report(source: Source, to: str) -> dict[str, Any]:
    names = {path: path if to == "orbax" else source.naming.source(path) for path in source.leaves}
    return {
        "format": to,
        "source": None if source.folder is None else str(source.folder.resolve()),
        "fingerprint": _fingerprint(source),
        "naming": source.naming.title,
        "dtype": source.config.dtype,
        "bytes": sum(map(source.size, source.leaves)),
        "tensors": [
            {
                "name": leaf.name,
                "shape": list(leaf.shape),
                "dtype": leaf.dtype,
                "target": names[path],
                "target_dtype": source.config.dtype,
            }
            for path, leaf in source.leaves.items()
        ],
        "ignored": dict(source.ignored),
    }


def _fingerprint(source: Source) -> str | None:
    """Changes whenever a file of the source does, so that a conversion is never continued from another checkpoint."""
    if source.folder is None:
        return None
    states = [(source.folder / name, (source.folder / name).stat()) for name in (CONFIG, *source.files)]
    text = repr([(file.name, state.st_size, state.st_mtime_ns) for file, state in states])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _beside(source: Source) -> list[Path]:
    """The files that go along: all but weights, their index, and what is written anew."""
    if source.folder is None:
        return []
    written = {CONFIG, orbax.RECORD}
    return sorted(
        path
        for path in source.folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and not path.name.endswith(".index.json")
        and path.name not in written
    )


def _check_space(folder: Path, size: int) -> None:
    """Refuses to begin, or to go on, with what will not fit."""
    size -= sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(
            f"{size / 1e9:.2f} GB are to be written and {folder.parent} has {free / 1e9:.2f} GB free: make room, or"
            " choose another place"
        )
