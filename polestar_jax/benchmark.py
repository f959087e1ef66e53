"""Times decoding methods on random weights, at the tokens per forward that the paper reports for them."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from models.published import LLADA_8B
from models.transformer import Config
from pallas_kernels.implementation import Implementation
from polestar_jax.decode import Decode, make_decode
from polestar_jax.replay import count_forwards, draw_counts, replay
from polestar_jax.types import NO_FORWARD, Method, Model

PAPER_TPF = {"vanilla": 1.0, "parallel": 2.95, "fast_dllm": 2.72, "polestar": 3.67}
"""Tokens per forward on GSM8K, generation length 256, LLaDA-8B-Instruct (tables 1 and 7 of the paper)."""

SAMPLED_FORWARDS = 8
"""Forwards that are timed of a method whose forwards are all alike; its decode is scaled up from them."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a benchmark: a LLaDA of random weights and one request.

    Attributes:
      model: fields of `models.transformer.Config`.
      prompt_length, gen_length, block_length: P, G, S.
    """

    model: dict[str, Any]
    prompt_length: int
    gen_length: int
    block_length: int


def _llada(vocab_size: int, size: int, layers: int, heads: int, feed_forward: int) -> dict[str, Any]:
    sizes = {"vocab_size": vocab_size, "model_size": size, "layers": layers, "heads": heads, "kv_heads": heads}
    ids = {"mask_id": vocab_size - 1, "eos_id": vocab_size - 2}
    return sizes | ids | {"feed_forward": feed_forward, "max_length": 4096, "rope_theta": 5e5, "epsilon": 1e-5}


def _fields_of(config: Config) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(config).items() if name != "family"}


SHAPES = {
    "tiny": Shape(_llada(512, 128, 4, 4, 384), prompt_length=64, gen_length=64, block_length=8),
    "small": Shape(_llada(2048, 384, 6, 6, 1024), prompt_length=256, gen_length=128, block_length=32),
    "medium": Shape(_llada(8192, 768, 12, 12, 2048), prompt_length=1024, gen_length=256, block_length=32),
    "llada-8b": Shape(_fields_of(LLADA_8B), prompt_length=1024, gen_length=256, block_length=32),
}


@dataclasses.dataclass
class Timing:
    """What was measured of one method.

    Attributes:
      label: the method, as it was asked for.
      decode: of the method with replayed commits.
      mean_commits: mean of the commits per forward that were drawn.
      forwards: of a whole decode.
      scaled: whether `decode_seconds` are scaled up from `SAMPLED_FORWARDS` forwards.
      kind_milliseconds: name of a kind of forward -> ms of each one timed.
      kind_forwards: name of a kind -> how many a decode has.
      decode_seconds: wall time of every whole decode.
      rows, rows_executed: mean per forward of a decode (`polestar_jax.metrics`).
    """

    label: str
    decode: Decode
    mean_commits: float
    forwards: int
    scaled: bool
    kind_milliseconds: dict[str, list[float]]
    kind_forwards: dict[str, int]
    decode_seconds: list[float]
    rows: float = 0.0
    rows_executed: float = 0.0


def prepare(
    model: Model,
    shape: Shape,
    label: str,
    method: Method,
    mean_commits: float,
    seed: int,
    kernels: Implementation | None = None,
) -> Timing:
    """A method with replayed commits; nothing is compiled or run yet. `kernels` as in `make_decode`."""
    counts = draw_counts(mean_commits, shape.gen_length, seed)
    decode = make_decode(model, replay(method, counts), gen_length=shape.gen_length, kernels=kernels)
    forwards = count_forwards(counts, shape.gen_length, method.schedule.span(shape.gen_length))
    scaled = len(decode.kinds) == 1 and forwards > SAMPLED_FORWARDS
    empty = {name: [] for name in decode.kinds}
    return Timing(label, decode, mean_commits, forwards, scaled, empty, dict.fromkeys(decode.kinds, 0), [])


def run_round(timing: Timing, params: Any, prompt: np.ndarray, report: Callable[[], None] = lambda: None) -> None:
    """Times every forward of one decode by its kind, and one whole decode where forwards differ.

    The first round of a timing compiles, and is forgotten: call it once before the rounds that count, then `forget`.
    """
    decode = timing.decode
    state = decode.init(jax.random.split(jax.random.key(0), 1), prompt.shape[1])
    state = jax.block_until_ready(decode.start(state, prompt))
    kinds, rows, executed = [], [], []
    for _ in range(SAMPLED_FORWARDS if timing.scaled else timing.forwards):
        begin = time.perf_counter()
        state, entry = decode.step(params, state)
        jax.block_until_ready(state)
        milliseconds = 1e3 * (time.perf_counter() - begin)
        assert entry.kind[0] != NO_FORWARD, "the replayed commits ended early"
        kinds.append(decode.kinds[int(entry.kind[0])])
        timing.kind_milliseconds[kinds[-1]].append(milliseconds)
        rows.append(float(entry.rows[0]))
        executed.append(float(entry.rows_executed[0]))
        report()
    timing.kind_forwards = {name: kinds.count(name) for name in decode.kinds}
    timing.rows, timing.rows_executed = float(np.mean(rows)), float(np.mean(executed))
    if timing.scaled:
        timing.kind_forwards = {kinds[0]: timing.forwards}
        timing.decode_seconds.append(
            np.mean(timing.kind_milliseconds[kinds[0]][-SAMPLED_FORWARDS:]) * timing.forwards / 1e3
        )
        return
    begin = time.perf_counter()
    jax.block_until_ready(decode(params, state, prompt))
    timing.decode_seconds.append(time.perf_counter() - begin)
    report()


def forget(timing: Timing) -> None:
    """Drops what was timed so far: a first round, which compiled."""
    timing.kind_milliseconds = {name: [] for name in timing.kind_milliseconds}
    timing.decode_seconds = []


def summarise(timing: Timing, shape: Shape) -> dict[str, Any]:
    """Medians and spreads of a timing, ready for JSON.

    `ms` are medians and quartiles by kind; `tps` is generated positions per second; `entry_share` is the share of a
    decode's time that block entries take.
    """
    stats = lambda values: dict(
        zip(("q1", "median", "q3"), np.round(np.percentile(values, (25, 50, 75)), 4).tolist(), strict=True)
    )
    spent = {
        name: timing.kind_forwards.get(name, 0) * np.median(ms) for name, ms in timing.kind_milliseconds.items() if ms
    }
    entries = sum(time for name, time in spent.items() if name.endswith("entry"))
    seconds = float(np.median(timing.decode_seconds))
    return {
        "method": timing.label,
        "mean_commits": timing.mean_commits,
        "forwards": timing.forwards,
        "positions_per_forward": shape.gen_length / timing.forwards,
        "scaled": timing.scaled,
        "kind_forwards": timing.kind_forwards,
        "ms": {name: stats(ms) for name, ms in timing.kind_milliseconds.items() if ms},
        "seconds": stats(timing.decode_seconds),
        "tps": shape.gen_length / seconds,
        "rows": timing.rows,
        "rows_executed": timing.rows_executed,
        "entry_share": float(entries / sum(spent.values())),
    }


def paper_commits(labels: Sequence[str]) -> dict[str, float]:
    """Mean commits per forward of each label's method; that of `parallel` where the paper has none."""
    return {label: PAPER_TPF.get(label.split(":")[0], PAPER_TPF["parallel"]) for label in labels}
