"""Dynamic-dLLM's adaptive parallel decoding: a threshold that falls with certainty and rises with change."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from polestar_jax.commit import Rule, candidate_rows, commit_rows, most_confident, reasons
from polestar_jax.feature_cache import vectors_change
from polestar_jax.rows import put_rows, take_rows
from polestar_jax.types import GENERATION, Canvas, Prediction, Scope, Signal, Spec, pytree, static

Mode = Literal["scalar", "position"]


@pytree
class Dynamics:
    """What the rule remembers.

    Attributes:
      threshold: float32 `[B, G]`; the same everywhere in mode "scalar".
      probability: float32 `[B, G, V]`, the last forward's, as it is declared by the rule.
      forwards: int32 `[B]`.
    """

    threshold: jax.Array
    probability: jax.Array
    forwards: jax.Array


@pytree
class PredictionDynamics(Rule):
    """Every candidate at or above a threshold that follows the predictions, and always the most confident one.

    From the second forward on, before anything is committed, the threshold changes by
    `- alpha (1 - p2) + beta (1 - cos(p, p before))`, p2 being the second largest probability of a position and p its
    whole distribution; in mode "scalar" by the mean of that over the masked positions of the block, in mode "position"
    every generated position's by its own. It goes on from block to block.

    Attributes:
      start: the first threshold.
      alpha, beta: weights of certainty and of change.
      mode: one threshold, or one per generated position.
    """

    start: float
    alpha: float
    beta: float
    mode: Mode = static(default="scalar")

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({"logits", GENERATION})

    def problems(self, spec: Spec) -> list[str]:
        modes = get_args(Mode)
        return [] if self.mode in modes else [f"dynamics={self.mode!r} must be one of {', '.join(modes)}"]

    def init(self, spec: Spec) -> Dynamics:
        shape = (spec.batch, spec.gen_length)
        return Dynamics(
            threshold=jnp.broadcast_to(jnp.asarray(self.start, jnp.float32), shape),
            probability=jnp.zeros((*shape, spec.model.config.vocab_size), jnp.float32),
            forwards=jnp.zeros((spec.batch,), jnp.int32),
        )

    def commit(self, spec: Spec, state: Dynamics, scope: Scope, canvas: Canvas, prediction: Prediction):
        eligible = candidate_rows(scope, prediction)
        position = prediction.slot - spec.prompt_length
        place = lambda plane, values: put_rows(plane, position, values, prediction.valid & (position >= 0))
        now = jax.nn.softmax(prediction.extra["logits"], axis=-1)
        second = jax.lax.top_k(now, 2)[0][..., 1]
        moved = vectors_change(now, take_rows(state.probability, position))
        step = self.beta * moved - self.alpha * (1 - second)
        if self.mode == "scalar":
            count = jnp.maximum(eligible.sum(axis=1, keepdims=True), 1)
            step = jnp.broadcast_to(jnp.where(eligible, step, 0).sum(axis=1, keepdims=True) / count, step.shape)
        step = jnp.where((state.forwards > 0)[:, None], step, 0.0)
        threshold = state.threshold + place(jnp.zeros_like(state.threshold), step)
        sure = eligible & (prediction.confidence >= take_rows(threshold, position))
        code = reasons(confidence=sure, forced=most_confident(prediction.confidence, eligible))
        state = Dynamics(threshold, place(state.probability, now), state.forwards + 1)
        return state, commit_rows(prediction, code, spec.length)
