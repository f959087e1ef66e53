"""What a decode cost and what it produced, counted from its output (design.md section 11; paper section D.1).

Everything here runs on the host, in NumPy, over the full trajectory: no early stop, nothing cut.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polestar_jax.types import DecodeOutput, Reason


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Counts of finished decodes, one entry per sequence, all `[B]`.

    Attributes:
      tokens: generated tokens that are not EOS.
      tokens_to_eos: generated tokens before the first EOS, the other convention in use.
      positions: canvas positions that were generated, G; EOS counts.
      forwards: a window entry or a refresh is one forward, a wait is none.
      rows: valid rows through the feed-forward part, mean over layers, summed over forwards.
      rows_executed: the same as the compiled program ran it, capacity and padding included.
      kinds: name of a kind of forward -> how many.
      commits: name of a reason -> positions committed for it.
    """

    tokens: np.ndarray
    tokens_to_eos: np.ndarray
    positions: np.ndarray
    forwards: np.ndarray
    rows: np.ndarray
    rows_executed: np.ndarray
    kinds: Mapping[str, np.ndarray]
    commits: Mapping[str, np.ndarray]

    @property
    def refreshes(self) -> np.ndarray:
        """Sparse updates of the cache inside a block; 0 for methods that have none."""
        return self.kinds.get("refresh", np.zeros_like(self.forwards))

    @property
    def entries(self) -> np.ndarray:
        """Forwards that entered a block, of every kind; 0 for methods whose first forward is like any other."""
        entries = [count for name, count in self.kinds.items() if name.split()[-1] == "entry"]
        return sum(entries, np.zeros_like(self.forwards))


def measure(output: DecodeOutput, *, eos_id: int, kinds: Sequence[str]) -> Metrics:
    """Counts of one decode.

    Args:
      output: of `decode(params, state, prompt)`.
      eos_id: the model's end-of-text id.
      kinds: names that `StepLog.kind` indexes, `decode.kinds`.
    """
    tokens, filled = np.asarray(output.tokens), np.asarray(output.filled)
    kind, reason = np.asarray(output.log.kind), np.asarray(output.log.reason)
    is_eos = filled & (tokens == eos_id)
    before_eos = np.cumsum(is_eos, axis=1) == 0
    total = lambda plane: np.asarray(plane, np.float64).sum(axis=1)
    return Metrics(
        tokens=(filled & ~is_eos).sum(axis=1),
        tokens_to_eos=(filled & before_eos).sum(axis=1),
        positions=filled.sum(axis=1),
        forwards=np.asarray(output.forwards, np.int64),
        rows=total(output.log.rows),
        rows_executed=total(output.log.rows_executed),
        kinds={name: (kind == number).sum(axis=1) for number, name in enumerate(kinds)},
        commits={each.name.lower(): (reason == each).sum(axis=(1, 2)) for each in Reason if each is not Reason.NONE},
    )


def concatenate(parts: Sequence[Metrics]) -> Metrics:
    """Counts of many decodes of one method as those of a single batch.

    Raises:
      ValueError: there is nothing to concatenate, or the decodes know different kinds of forwards.
    """
    if not parts:
        raise ValueError("no decodes to add up; give at least one")
    names = [tuple(part.kinds) for part in parts]
    if len(set(names)) > 1:
        raise ValueError(f"decodes of different methods cannot be added up: their forwards are {set(names)}")

    def join(*values: Any) -> Any:
        if isinstance(values[0], Mapping):
            return {name: np.concatenate([value[name] for value in values]) for name in values[0]}
        return np.concatenate(values)

    fields = [field.name for field in dataclasses.fields(Metrics)]
    return Metrics(**{name: join(*(getattr(part, name) for part in parts)) for name in fields})


def tokens_per_forward(metrics: Metrics, *, to_eos: bool = False) -> float:
    """TPF: tokens over forwards, both summed over the decodes.

    Args:
      metrics: of any number of decodes.
      to_eos: count tokens before the first EOS instead of all that are not EOS.
    """
    return _ratio(metrics.tokens_to_eos if to_eos else metrics.tokens, metrics.forwards)


def tokens_per_second(metrics: Metrics, seconds: float) -> float:
    """TPS: the tokens of TPF over the wall time of all decodes."""
    return float(metrics.tokens.sum() / seconds)


def summarize(metrics: Metrics, seconds: float | None = None) -> dict[str, Any]:
    """The numbers of a results table, ready for JSON.

    Args:
      metrics: of any number of decodes.
      seconds: wall time of all of them, for TPS.

    Returns:
      `tpf`, `positions_per_forward`, `rows` and `rows_executed` are sums over sums of forwards; `forwards`,
      `refreshes`, `entries`, `kinds` and `commits` are means per sequence; `tps` is None without `seconds`.
    """
    mean = lambda counts: float(counts.mean())
    return {
        "tpf": tokens_per_forward(metrics),
        "tpf_to_eos": tokens_per_forward(metrics, to_eos=True),
        "positions_per_forward": _ratio(metrics.positions, metrics.forwards),
        "tps": None if seconds is None else tokens_per_second(metrics, seconds),
        "forwards": mean(metrics.forwards),
        "rows": _ratio(metrics.rows, metrics.forwards),
        "rows_executed": _ratio(metrics.rows_executed, metrics.forwards),
        "refreshes": mean(metrics.refreshes),
        "entries": mean(metrics.entries),
        "kinds": {name: mean(counts) for name, counts in metrics.kinds.items()},
        "commits": {name: mean(counts) for name, counts in metrics.commits.items()},
    }


def before_eos(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """The ids of one generation `[G]` before the first EOS, for showing and scoring."""
    ends = np.flatnonzero(np.asarray(tokens) == eos_id)
    return np.asarray(tokens)[: ends[0] if ends.size else None]


def binomial_error(share: float, count: int) -> float:
    """Standard error of a share of `count` independent items."""
    return (share * (1 - share) / count) ** 0.5


def paired_difference(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Mean of `first - second` over the same items, and its standard error; NaN for a single item.

    The items' own difficulty cancels, so this is much smaller than the errors of two separate samples.
    """
    difference = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    count = difference.size
    error = difference.std(ddof=1) / count**0.5 if count > 1 else float("nan")
    return float(difference.mean()), float(error)


def _ratio(above: np.ndarray, below: np.ndarray) -> float:
    return float(above.sum() / below.sum())
