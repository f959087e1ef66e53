"""KLASS's commit rule: sure predictions whose distribution stopped moving (arXiv 2511.05664, algorithm 1)."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from polestar_jax.commit import Rule, candidate_rows, commit_rows, most_confident, quota_of, rank, reasons
from polestar_jax.rows import put_rows, take_rows
from polestar_jax.types import COMPUTED, Canvas, Prediction, Scope, Signal, Spec, pytree, static

FLOOR = 1e-12
"""Added to probabilities before their logarithm: a position without an earlier distribution diverges by about 27."""

Strategy = Literal["all", "max_conf", "min_kl", "random"]


@pytree
class Distributions:
    """What `Stability` remembers of every generated position.

    Attributes:
      probability: float32 `[B, G, V]`, as last predicted; zero where the last forward predicted nothing.
      divergence: float32 `[B, G, H]`, the last KL divergences, the newest last.
      masks: int32 `[B]`, masks of the block at its entry.
    """

    probability: jax.Array
    divergence: jax.Array
    masks: jax.Array


@pytree
class Stability(Rule):
    """Candidates with confidence > tau_c whose last H divergences KL(now || one forward before) are all < eps_kl.

    Where none is ready the most confident ones are taken, as many as `steps` asks for in this forward. Every generated
    position that a forward predicts is tracked, those of later blocks too; with a cache only computed rows are, and a
    position that was left out starts anew, unstable.

    Attributes:
      tau_c: confidence threshold.
      eps_kl: divergence threshold, in nats.
      history: H.
      strategy: "all" commits every ready candidate, "max_conf", "min_kl", "random" one of them.
      steps: forwards for the whole generation, a multiple of the number of blocks; None is one per token. With fewer a
        block may end with masks left; the schedule must have the same number.
      strict: confidence > tau_c; else >=, as on Dream.
      gate: nothing is stable in the first H - 1 forwards of a block.
    """

    tau_c: float = 0.9
    eps_kl: float = 0.01
    history: int = static(default=2)
    strategy: Strategy = static(default="all")
    steps: int | None = static(default=None)
    strict: bool = static(default=True)
    gate: bool = static(default=True)

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({"logits", COMPUTED})

    def problems(self, spec: Spec) -> list[str]:
        found = []
        if self.history < 1:
            found.append(f"history={self.history} must be at least 1")
        if self.strategy not in get_args(Strategy):
            found.append(f"strategy={self.strategy!r} must be one of {', '.join(get_args(Strategy))}")
        return found

    def init(self, spec: Spec) -> Distributions:
        size = (spec.batch, spec.gen_length)
        return Distributions(
            probability=jnp.zeros((*size, spec.model.config.vocab_size), jnp.float32),
            divergence=jnp.zeros((*size, self.history), jnp.float32),
            masks=jnp.zeros((spec.batch,), jnp.int32),
        )

    def commit(self, spec: Spec, state: Distributions, scope: Scope, canvas: Canvas, prediction: Prediction):
        eligible, confidence = candidate_rows(scope, prediction), prediction.confidence
        probability, divergence = self._track(spec, state, prediction)
        stable = (divergence < self.eps_kl).all(axis=2)
        if self.gate:
            stable = stable & (scope.phase >= self.history - 1)[:, None]
        sure = confidence > self.tau_c if self.strict else confidence >= self.tau_c
        ready = eligible & stable & sure
        picked = self._pick(spec, scope, prediction, ready, divergence[..., -1])
        masks = jnp.where(scope.entering, scope.candidates.sum(axis=1, dtype=jnp.int32), state.masks)
        budget = (spec.gen_length if self.steps is None else self.steps) * spec.span // spec.gen_length
        quota = jnp.maximum(quota_of(masks, budget, scope.phase), 1)
        none = ~ready.any(axis=1, keepdims=True)
        forced = eligible & none & (rank(confidence, eligible) < quota[:, None])
        commits = commit_rows(prediction, reasons(confidence=picked, forced=forced), spec.length)
        if self.steps is not None:
            left = (scope.candidates & ~commits.write).any(axis=1)
            last = (scope.stop >= spec.length) & (~left | (scope.phase + 1 >= budget))
            commits = dataclasses.replace(commits, stop=last)
        place = lambda rows: put_rows(
            jnp.zeros((spec.batch, spec.gen_length, rows.shape[2])), prediction.slot - spec.prompt_length, rows, known
        )
        known = prediction.valid & (prediction.slot >= spec.prompt_length)
        return Distributions(place(probability), place(divergence), masks), commits

    def _track(self, spec: Spec, state: Distributions, prediction: Prediction) -> tuple[jax.Array, jax.Array]:
        """The distributions `[B, R, V]` of this forward and the last H divergences `[B, R, H]`."""
        place = prediction.slot - spec.prompt_length
        now, before = jax.nn.softmax(prediction.extra["logits"]), take_rows(state.probability, place)
        moved = jnp.sum(now * (jnp.log(now + FLOOR) - jnp.log(before + FLOOR)), axis=2, keepdims=True)
        return now, jnp.concatenate([take_rows(state.divergence, place)[..., 1:], moved], axis=2)

    def _pick(
        self, spec: Spec, scope: Scope, prediction: Prediction, ready: jax.Array, divergence: jax.Array
    ) -> jax.Array:
        if self.strategy == "all":
            return ready
        if self.strategy == "max_conf":
            return most_confident(prediction.confidence, ready)
        if self.strategy == "min_kl":
            return most_confident(-divergence, ready)
        draw = jax.vmap(lambda key: jax.random.uniform(key, (spec.gen_length,)))(scope.keys)
        return most_confident(take_rows(draw, prediction.slot - spec.prompt_length), ready)
