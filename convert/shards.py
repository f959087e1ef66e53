"""Reads the safetensors files of a Hugging Face folder: one file, or shards with an index.

Headers are read and checked first; weights later, one tensor at a time and without mapping files into memory, so that
the peak stays near the largest tensor.
"""

import dataclasses
import itertools
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor lies and what its header says.

    Attributes:
      name: of the tensor.
      file: that holds it.
      shape: of the tensor.
      dtype: in the format's own words (`"BF16"`).
      start: its first byte in the file.
      size: its bytes.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    size: int


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not JSON, or not an object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: copy it from the checkpoint's Hugging Face folder")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, not an object: download it again")
    return content


def scan(folder: Path) -> tuple[dict[str, Entry], list[str]]:
    """Reads the headers of every safetensors file of a folder.

    Args:
      folder: holds `model.safetensors`, which wins, or shards and `model.safetensors.index.json`.

    Returns:
      The tensors by name, and a line for every disagreement between the shards and their index.

    Raises:
      FileNotFoundError: naming the files that are missing.
      ValueError: naming every file that is truncated or corrupt, and those that are missing beside them.
    """
    if (folder / SINGLE).is_file():
        return {entry.name: entry for entry in _headers([folder / SINGLE])}, []
    if not (folder / INDEX).is_file():
        others = sorted(path.name for pattern in ("*.safetensors", "*.bin", "*.pt") for path in folder.glob(pattern))
        hint = f" (it has {', '.join(others)}; pickled weights are never read)" if others else ""
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}: copy the missing file into it")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(_is_file_name(file) for file in places.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from tensor names to file names: download it again")
    entries, problems = {}, []
    for entry in _headers([folder / file for file in sorted(set(places.values()))]):
        if entry.name in entries:
            first = entries[entry.name].file.name
            problems.append(f"twice: {entry.name} is in {first} and in {entry.file.name}")
        elif places.get(entry.name) != entry.file.name:
            listed = f"puts it in {places[entry.name]}" if entry.name in places else "does not list it"
            problems.append(f"index: {entry.name} is in {entry.file.name}, but {INDEX} {listed}")
        entries[entry.name] = entry
    problems += [
        f"index: {name} is not in {file}, where {INDEX} puts it" for name, file in places.items() if name not in entries
    ]
    return entries, problems


def read(entries: Iterable[Entry]) -> Iterator[tuple[Entry, np.ndarray]]:
    """Yields each entry with its values, opening every file once. All have float dtypes of 16 or 32 bits.

    Raises:
      ValueError: naming a file that became unreadable since its header was read.
    """
    ordered = sorted(entries, key=lambda entry: (entry.file, entry.start))
    for file, group in itertools.groupby(ordered, key=lambda entry: entry.file):
        with file.open("rb") as stream:
            for entry in group:
                stream.seek(entry.start)
                values = np.fromfile(stream, np.uint8, entry.size)
                if values.size != entry.size:
                    raise ValueError(f"{file} is truncated or corrupt (it ends inside {entry.name}): download it again")
                yield entry, values.view(_DTYPES[entry.dtype]).reshape(entry.shape)
                del values  # else it would stay while the next one is read


def _is_file_name(file: Any) -> bool:
    return isinstance(file, str) and Path(file).name == file


def _headers(files: Iterable[Path]) -> list[Entry]:
    entries, missing, corrupt = [], [], []
    for file in files:
        if not file.is_file():
            missing.append(f"{file} is missing")
            continue
        try:
            entries += _read_header(file)
        except ValueError as error:
            corrupt.append(str(error))
    if missing or corrupt:
        message = "; ".join(missing + corrupt) + ": download again what is missing or damaged"
        raise ValueError(message) if corrupt else FileNotFoundError(message)
    return entries


def _read_header(file: Path) -> list[Entry]:
    try:
        with safe_open(file, "np", backend="pread"):
            pass  # which checks the header, and the length of the file against it
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or corrupt ({error})") from error
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    entries = []
    for name, fields in header.items():
        start, end = fields["data_offsets"]
        entries.append(Entry(name, file, tuple(fields["shape"]), fields["dtype"], 8 + length + start, end - start))
    return entries
