"""Where a command prints, and how it writes its results."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

STDOUT = "-"


def make_consoles(json_target: str | None) -> tuple[Console, Console]:
    """The console for results, and the one for progress and warnings.

    Results go to stdout, unless JSON has it for itself.
    """
    notes = Console(stderr=True, highlight=False)
    return (notes if json_target == STDOUT else Console(highlight=False)), notes


def check_target(option: str, target: str | None) -> None:
    """Refuses a file that cannot be written, before the work is done rather than after.

    Raises:
      ValueError: naming the option and the file.
    """
    if target is None or target == STDOUT:
        return
    path = Path(target)
    if path.is_dir():
        raise ValueError(f"{option} {target} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {target}: there is no folder {path.absolute().parent}; make it first")


def write_json(target: str | None, content: dict[str, Any]) -> None:
    """Writes JSON to a file, to stdout for "-", or not at all for None."""
    if target is None:
        return
    # Standard JSON has no NaN and no infinity.
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    # Lists of numbers on one line; a line break is never part of a JSON string.
    text = re.sub(r"\[\n[^\[\]{}\"]*\]", lambda match: re.sub(r"\s+", " ", match[0]), text)
    if target == STDOUT:
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)
