"""What `polestar demo --methods all --items 100 --json` measured on the embedded checkpoints, once.

A measurement of a day and a machine, which the record names: for plots that would take minutes to measure anew.
"""

import json
from importlib.resources import files
from typing import Any


def read_recorded(model: str) -> dict[str, Any]:
    """The record of a checkpoint: `environment` (date, revision, command, machine), `items`, and `rows` by method.

    Raises:
      ValueError: nothing was recorded of that checkpoint.
    """
    file = files(__package__) / f"{model}.json"
    if not file.is_file():
        raise ValueError(f"nothing was recorded of {model!r}; `polestar demo --methods all --json FILE` measures it")
    return json.loads(file.read_text())
