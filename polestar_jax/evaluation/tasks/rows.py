"""Rows of a benchmark, from a local file or from the hub, as lm-eval takes them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(file: str | Path, fields: Sequence[str]) -> list[Row]:
    """The rows of a jsonl file, each with at least `fields`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: naming the first line that is no JSON object, or lacks a field.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give a jsonl file with the fields {', '.join(fields)}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON ({error})") from error
        lacking = [field for field in fields if not isinstance(row, dict) or field not in row]
        if lacking:
            raise ValueError(f"{path}:{number} lacks {', '.join(lacking)}: rows have {', '.join(fields)}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def local_dataset(**splits: Sequence[Row]) -> Callable[..., Any]:
    """What a task's `custom_dataset` is: a function without arguments that matter, returning the splits."""

    def load(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {name: Dataset.from_list(list(rows)) for name, rows in splits.items()}

    return load


def source(hub: str, name: str | None, **splits: Sequence[Row] | None) -> dict[str, Any]:
    """The part of a task's config that says where its rows are: given ones, or those of the hub."""
    given = {split: rows for split, rows in splits.items() if rows is not None}
    if given:
        return {"custom_dataset": local_dataset(**given)}
    return {"dataset_path": hub} | ({} if name is None else {"dataset_name": name})
