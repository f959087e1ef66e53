"""Slow-Fast Sampling (arXiv 2506.10848): slow forwards find a stretch that is about to settle, fast ones fill it."""

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.card import Card
from polestar_jax.commit import Threshold, candidate_rows
from polestar_jax.head import Greedy
from polestar_jax.no_cache import NoCache
from polestar_jax.rows import iota
from polestar_jax.schedule import Blocks, SemiAutoregressive
from polestar_jax.types import Canvas, Method, Prediction, Scope, Spec, pytree, static

CARD = Card(
    title="SlowFast",
    paper="2506.10848",
    reuses="nothing",
    refreshes="everything up to the end of the stretch in fast forwards after the first, else everything",
    commits="confidence at least `threshold`, and the most confident: anywhere in the rest of the block while slow, in"
    " the stretch while fast",
    state="the stretch, and the last `window` estimates of its end",
    rows={"full": "N; start of the canvas to end of the stretch in fast forwards after the first"},
    extra="none",
    twin="`parallel`, with `floor` 0 (the stretch is the block) in the last block; has no cache",
)

PRESETS = {
    "paper": {"floor": 0.1, "threshold": 0.85, "explore": 8, "leave_early": True},
    "release": {"floor": 0.3, "threshold": 0.9, "explore": 6, "leave_early": False},
}
"""Defaults of the text and of the public code, whose slow phase always takes all its forwards, even with nothing left
to do."""


def slowfast(
    preset: str = "paper",
    *,
    floor: float | None = None,
    threshold: float | None = None,
    explore: int | None = None,
    window: int = 2,
    deviation: float = 1.0,
    leave_early: bool | None = None,
    block_length: int = 32,
) -> Method:
    """Slow-Fast Sampling; None takes the preset's value.

    Args:
      preset: "paper" or "release".
      floor: tau_min, confidence that the last position of a stretch has at least.
      threshold: tau_high, confidence that is committed.
      explore: K_max, most forwards of a slow phase.
      window: W_hist, estimates of the stretch's end that have to agree.
      deviation: standard deviation of agreeing estimates, in positions.
      leave_early: end the slow phase when the estimates agree or nothing is left to do.
      block_length: S.

    Raises:
      ValueError: naming an unknown preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} must be one of {', '.join(PRESETS)}")
    given = {"floor": floor, "threshold": threshold, "explore": explore, "leave_early": leave_early}
    chosen = PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
    tau = chosen.pop("threshold")
    return Method(
        name="slowfast" if preset == "paper" else f"slowfast:{preset}",
        cache=NoCache(),
        rule=Threshold(tau),
        schedule=Cycles(SemiAutoregressive(block_length=block_length), window=window, deviation=deviation, **chosen),
        sampler=Greedy(),
    )


@pytree
class Cycle:
    """Where a batch row is in its cycles.

    Attributes:
      blocks: see `Blocks`.
      start, end: int32 `[B]`, the stretch, counted from the block's first position.
      estimates: int32 `[B, W]`, of its end, the latest last.
      seen: int32 `[B]`, how many there are in this cycle.
      agreed: bool `[B]`, whether they settled on an end.
      fast: bool `[B]`.
      step: int32 `[B]`, forwards already spent in this phase.
    """

    blocks: Blocks
    start: jax.Array
    end: jax.Array
    estimates: jax.Array
    seen: jax.Array
    agreed: jax.Array
    fast: jax.Array
    step: jax.Array


@pytree
class Cycles:
    """Cycles of a slow and a fast phase inside blocks; attributes as in `slowfast`."""

    blocks: SemiAutoregressive
    floor: float
    deviation: float
    explore: int = static()
    window: int = static()
    leave_early: bool = static()

    def problems(self, spec: Spec) -> list[str]:
        found = self.blocks.problems(spec)
        counts = {"explore": self.explore, "window": self.window}
        return found + [f"{name}={value} must be at least 1" for name, value in counts.items() if value < 1]

    def span(self, gen_length: int) -> int:
        return self.blocks.span(gen_length)

    def max_forwards(self, gen_length: int) -> int:
        """G, and where the slow phase always takes all its forwards what it wastes at the end of a block."""
        waste = 0 if self.leave_early else gen_length // self.span(gen_length) * (self.explore - 1)
        return self.blocks.max_forwards(gen_length) + waste

    def init(self, spec: Spec) -> Cycle:
        zeros, never = jnp.zeros((spec.batch,), jnp.int32), jnp.zeros((spec.batch,), bool)
        estimates = jnp.zeros((spec.batch, self.window), jnp.int32)
        whole = jnp.full_like(zeros, spec.span)
        return Cycle(self.blocks.init(spec), zeros, whole, estimates, zeros, never, never, zeros)

    def scope(self, spec: Spec, state: Cycle, canvas: Canvas, keys: jax.Array) -> Scope:
        scope = self.blocks.scope(spec, state.blocks, canvas, keys)
        place = iota(spec.length) - scope.start[:, None]
        before_end = place < state.end[:, None]
        candidates = scope.candidates & (place >= state.start[:, None]) & (before_end | ~state.fast[:, None])
        cut = state.fast & (state.step > 0)
        return dataclasses.replace(scope, candidates=candidates, visible=scope.visible & (before_end | ~cut[:, None]))

    def observe(self, spec: Spec, state: Cycle, scope: Scope, prediction: Prediction) -> tuple[Cycle, Scope]:
        """Estimates the end of the stretch: behind the last mask whose prediction is at all confident."""
        able = candidate_rows(scope, prediction) & (prediction.confidence >= self.floor)
        place = prediction.slot - scope.start[:, None] + 1
        last = jnp.max(jnp.where(able, place, 0), axis=1)
        estimate = jnp.where(able.any(axis=1), last, jnp.minimum(state.start + 1, spec.span))
        estimates = jnp.concatenate([state.estimates[:, 1:], estimate[:, None]], axis=1)
        seen = jnp.minimum(state.seen + 1, self.window)
        recent = jnp.where(iota(self.window) >= self.window - seen[:, None], estimates, 0)
        total, squares = recent.sum(axis=1), (recent**2).sum(axis=1)
        close = seen * squares - total**2 < (self.deviation * seen) ** 2  # variance < deviation ** 2, times seen ** 2
        agreed = (seen == self.window) & close
        end = jnp.where(agreed, estimate, total // seen)
        kept = state.fast | state.agreed
        pick = lambda old, new: jnp.where(kept.reshape((-1,) + (1,) * (new.ndim - 1)), old, new)
        fields = {"estimates": estimates, "seen": seen, "agreed": agreed, "end": end}
        picked = {name: pick(getattr(state, name), value) for name, value in fields.items()}
        return dataclasses.replace(state, **picked), scope

    def advance(self, spec: Spec, state: Cycle, scope: Scope, canvas: Canvas) -> Cycle:
        place = iota(spec.length) - scope.start[:, None]
        left = lambda first, stop: (canvas.masked & (place >= first[:, None]) & (place < stop[:, None])).any(axis=1)
        settled = state.step + 1 >= self.explore
        if self.leave_early:
            settled = settled | state.agreed | ~left(state.start, scope.stop - scope.start)
        slow = ~state.fast & ~settled
        fast = ~slow & left(state.start, state.end)
        anew = ~slow & ~fast
        following = self.blocks.advance(spec, state.blocks, scope, canvas)
        # A slow phase with nothing left in its block stays there until it is over.
        stay = Blocks(scope.index, scope.phase + 1)
        blocks = jax.tree.map(lambda here, there: jnp.where(anew, there, here), stay, following)
        entered = blocks.index != scope.index
        return Cycle(
            blocks=blocks,
            start=jnp.where(anew, jnp.where(entered, 0, state.end), state.start),
            end=jnp.where(anew, spec.span, state.end),
            estimates=state.estimates,
            seen=jnp.where(anew, 0, state.seen),
            agreed=state.agreed & ~anew,
            fast=fast,
            step=jnp.where(anew | (fast & ~state.fast), 0, state.step + 1),
        )
