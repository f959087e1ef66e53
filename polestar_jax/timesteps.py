"""Commit rules over a given number of forwards, as Dream samples (arXiv 2508.15487 and its public code)."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from polestar_jax.commit import Rule, candidate_rows, commit_rows, drawn, rank, reasons, score_of
from polestar_jax.schedule import masks_at_entry, step_problems, steps_per_block
from polestar_jax.types import Canvas, Prediction, Scope, Signal, Spec, pytree, static

Order = Literal["random", "confidence", "margin", "entropy"]


def fractions(steps: int, eps: float) -> np.ndarray:
    """float32 `[steps]`: the share of the masks left that each forward commits, 1 - t[i + 1] / t[i]; 1 in the last.

    The times t fall evenly from 1 to `eps`. How many masks a share is gets truncated, so its rounding matters: this is
    float32 arithmetic on the host, in the order in which torch has it.
    """
    one, last, index = np.float32(1), np.float32(eps), np.arange(steps + 1)
    step = (last - one) / np.float32(steps)
    rising, falling = one + step * index.astype(np.float32), last - step * index[::-1].astype(np.float32)
    time = np.where(index < (steps + 1) // 2, rising, falling)
    share = one - time[1:] / time[:-1]
    share[-1] = 1
    return share


@pytree
class Timesteps(Rule):
    """Dream's schedule: forward i commits the share 1 - t[i + 1] / t[i] of the masks that are left in the block.

    Which ones: any, each with that probability ("random", where a forward may commit none or all), or the first of an
    order, truncated to a whole number: with one forward per token the first one commits nothing and the last one two.

    Attributes:
      steps: forwards for the whole generation, a multiple of the number of blocks; None is one per token.
      eps: the last time.
      order: "confidence", "margin" between the two likeliest tokens, "entropy" (the least first), or "random".
      noise: None, or the temperature of Gumbel noise on the order, which makes it a draw in proportion to
        exp(score / noise) without replacement.
    """

    steps: int | None = static(default=None)
    eps: float = static(default=1e-3)
    order: Order = static(default="entropy")
    noise: float | None = None

    progresses = False

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({self.order} & {"margin", "entropy"})

    def problems(self, spec: Spec) -> list[str]:
        found = step_problems(spec, self.steps)
        if self.order not in get_args(Order):
            found.append(f"order={self.order!r} must be one of {', '.join(get_args(Order))}")
        if not 0 < self.eps < 1:
            found.append(f"eps={self.eps} must be between 0 and 1")
        if self.noise is not None and not self.noise > 0:
            found.append(f"noise={self.noise} must be greater than 0; leave it out for none")
        return found

    def commit(self, spec: Spec, state, scope: Scope, canvas: Canvas, prediction: Prediction):
        share = jnp.asarray(fractions(steps_per_block(spec, self.steps), self.eps))
        now = share[jnp.minimum(scope.phase, share.shape[0] - 1)]
        eligible = candidate_rows(scope, prediction)
        if self.order == "random":
            chosen = drawn(spec, scope, prediction, jax.random.uniform) < now[:, None]
        else:
            # Masks, not rows: at a block's edge a mask may have no row that predicts it.
            count = (scope.candidates.sum(axis=1) * now).astype(jnp.int32)
            score = score_of(prediction, self.order)
            if self.noise is not None:
                score = score / self.noise + drawn(spec, scope, prediction, jax.random.gumbel)
            chosen = rank(score, eligible) < count[:, None]
        return state, commit_rows(prediction, reasons(forced=eligible & chosen), spec.length)


@pytree
class BudgetedThreshold(Rule):
    """Confident candidates, as many at most as an even pace allows by now; always the most confident one.

    Fast-dLLM's "confidence_threshold" for Dream: what a forward leaves of its budget is carried over.

    Attributes:
      tau: a candidate needs at least this confidence.
      steps: forwards of the pace for the whole generation, a multiple of the number of blocks; None is one per token.
        After them there is no limit.
    """

    tau: float
    steps: int | None = static(default=None)

    def problems(self, spec: Spec) -> list[str]:
        return step_problems(spec, self.steps)

    def init(self, spec: Spec) -> jax.Array:
        """int32 `[B]`: masks of the block at its entry."""
        return jnp.zeros((spec.batch,), jnp.int32)

    def commit(self, spec: Spec, state: jax.Array, scope: Scope, canvas: Canvas, prediction: Prediction):
        at_entry, steps = masks_at_entry(scope, state), steps_per_block(spec, self.steps)
        committed = at_entry - scope.candidates.sum(axis=1, dtype=jnp.int32)
        budget = at_entry * jnp.minimum(scope.phase + 1, steps) // steps - committed
        eligible = candidate_rows(scope, prediction)
        place = rank(prediction.confidence, eligible)
        confident = eligible & (place < budget[:, None]) & (prediction.confidence >= self.tau)
        code = reasons(confidence=confident, forced=eligible & (place == 0))
        return at_entry, commit_rows(prediction, code, spec.length)
