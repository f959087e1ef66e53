"""Benchmarks as configs of lm-eval: ours, with rows from local files or from the hub; others are lm-eval's own."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polestar_jax.evaluation.tasks import embedded, gsm8k, humaneval, lists, math, mbpp, puzzles
from polestar_jax.evaluation.tasks.rows import read_rows

_FROM_FILES = {"gsm8k": gsm8k, "math": math, "humaneval": humaneval, "mbpp": mbpp}
_WITH_SHOTS = ("gsm8k", "mbpp")
WITH_PROGRAMS = ("humaneval", "mbpp")  # they are scored by running what was generated
_MADE: dict[str, Callable[[int, int], list[dict[str, Any]]]] = {
    "lists_easy": lambda count, seed: [lists.make_task(name, count, seed) for name in lists.EASY],
    "lists_hard": lambda count, seed: [lists.make_task(name, count, seed) for name in lists.HARD],
    "latin_square": lambda count, seed: [puzzles.make_task("latin_square", count, seed)],
    "sudoku": lambda count, seed: [puzzles.make_task("sudoku", count, seed)],
    "embedded": lambda count, seed: [embedded.make_task(name, count, seed) for name in ("arithmetic", "lists")],
}
NAMES = (*_FROM_FILES, *_MADE)


def make_tasks(
    names: Sequence[str],
    *,
    rows: Mapping[str, str | Path] | None = None,
    shots: Mapping[str, str | Path] | None = None,
    count: int = 100,
    seed: int = 0,
) -> list[str | dict[str, Any]]:
    """What lm-eval's `tasks` argument takes.

    Args:
      names: ours (`NAMES`), or lm-eval's own, which are passed on.
      rows, shots: jsonl file by task, of its documents and of its worked examples; the hub where there is none.
      count, seed: of exercises that are made here.
    """
    rows, shots = dict(rows or {}), dict(shots or {})
    for option, given, known in (("rows", rows, _FROM_FILES), ("shots", shots, _WITH_SHOTS)):
        if strangers := [name for name in given if name not in names or name not in known]:
            raise ValueError(f"{option} of {', '.join(strangers)}: only {', '.join(known)} take them, and are run")
    made: list[str | dict[str, Any]] = []
    for name in names:
        if name in _FROM_FILES:
            module = _FROM_FILES[name]
            files = {
                option: read_rows(given[name], module.FIELDS)
                for option, given in (("rows", rows), ("shots", shots))
                if name in given
            }
            made.append(module.make_task(**files))
        elif name in _MADE:
            made += _MADE[name](count, seed)
        else:
            made.append(name)
    return made
