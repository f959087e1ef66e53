"""What the parts of `gpu_check.py` share: saving, and timing."""

import time
from collections.abc import Callable
from typing import Any

import jax

Save = Callable[[dict[str, Any]], None]
"""Keeps a part's results so far, so that nothing is lost when it is stopped or crashes."""


def timed(run: Callable[..., Any], *arguments: Any, repeat: int, warm: bool = True) -> list[float]:
    """Seconds of each of `repeat` runs, after one that does not count."""
    if warm:
        jax.block_until_ready(run(*arguments))
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        seconds.append(time.perf_counter() - begin)
    return seconds
