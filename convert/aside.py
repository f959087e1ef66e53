"""Folders that appear whole or not at all: written aside, renamed at the end, continued after a kill."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SUFFIX = ".converting"
_REPLACED = ".replaced"


def aside_of(target: Path) -> Path:
    """Where a folder is written before it gets its name."""
    return target.with_name(target.name + SUFFIX)


@contextlib.contextmanager
def written_aside(
    target: Path, record: str, plan: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when the block ends.

    An error in the block removes what was written. What a kill or an interrupt leaves behind stays for `resume`.

    Args:
      target: must not exist, or be empty, or be given up with `overwrite`.
      record: name of the JSON file inside that says what is written; it stays.
      plan: its content. A folder is only continued under the plan that it was begun with.
      resume: continue what an earlier process left behind; a first run if there is nothing.
      overwrite: replace `target` at the end, in two renames.

    Raises:
      FileExistsError: `target` is there, or an unfinished folder is there without `resume`.
      ValueError: the unfinished folder belongs to another plan.
      OSError: the folder cannot be written, or another process is writing it.
    """
    target = Path(os.path.abspath(target))
    aside = aside_of(target)
    check_target(target, overwrite=overwrite)
    if aside.exists():
        if not resume:
            raise FileExistsError(
                f"{aside} is left from a conversion that was stopped: continue it with --resume, or delete it"
            )
        _check_plan(aside, record, plan)
    try:
        aside.mkdir(exist_ok=True)
    except OSError as error:
        raise OSError(f"{target} cannot be written ({error.strerror}): choose another place") from error
    with _locked(aside):
        try:
            write_json(aside / record, plan)
            yield aside
            _rename(aside, target)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, OSError) and error.errno and not error.filename:
                raise OSError(f"{target} cannot be written ({error.strerror})") from error
            raise


def check_target(target: Path, *, overwrite: bool = False) -> None:
    """Refuses a place that cannot be written, before anything is read.

    Raises:
      FileExistsError: something is there that is not an empty folder.
      FileNotFoundError: the folder that it should be in is not there.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target} cannot be made: there is no folder {target.parent}; make it first")
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; name a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise FileExistsError(f"{target} is not empty: name another folder, delete it, or replace it with --overwrite")


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file that is whole whenever it is there."""
    new = file.with_name(f".{file.name}.new")
    with new.open("w") as stream:
        stream.write(json.dumps(content, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)


def _check_plan(aside: Path, record: str, plan: Mapping[str, Any]) -> None:
    if not (aside / record).is_file():  # killed before the first write
        if any(path.name != f".{record}.new" for path in aside.iterdir()):
            raise ValueError(f"{aside} was not written by a conversion: move it away")
        return
    begun = json.loads((aside / record).read_text())
    different = [name for name, value in plan.items() if begun.get(name) != json.loads(json.dumps(value))]
    if different:
        raise ValueError(
            f"{aside} belongs to another conversion (other {', '.join(different)}): delete it and start again without"
            " --resume"
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps two processes out of one folder; the system drops the lock of a process that dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise OSError(f"another process is writing {folder}: wait for it") from None
    try:
        yield
    finally:
        os.close(handle)


def _rename(aside: Path, target: Path) -> None:
    for path in (*aside.rglob("*"), aside):
        _flush(path)
    replaced = target.with_name(target.name + _REPLACED)
    if target.is_dir() and any(target.iterdir()):
        os.rename(target, replaced)
    os.rename(aside, target)  # onto nothing, or onto an empty folder
    _flush(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    """Waits until a file or a folder's list of names is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
