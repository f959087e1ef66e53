"""Dimple's confident decoding (arXiv 2505.16990): what is confident, else the next scheduled number of tokens."""

import jax
import jax.numpy as jnp

from polestar_jax.card import Card
from polestar_jax.commit import Rule, candidate_rows, commit_rows, rank, reasons, score_of
from polestar_jax.head import Greedy
from polestar_jax.no_cache import NoCache
from polestar_jax.rows import iota
from polestar_jax.schedule import SemiAutoregressive, masks_at_entry, step_problems, steps_per_block
from polestar_jax.types import Canvas, Method, Prediction, Scope, Signal, Spec, pytree, static

CARD = Card(
    title="Dimple's confident decoding",
    paper="2505.16990",
    reuses="nothing",
    refreshes="everything, in every forward",
    commits="confidence above `threshold`; if nothing is, as many as the next step of the diffusion schedule asks for",
    state="masks of the block at its entry",
    rows={"full": "N"},
    extra="none",
    twin="has no cache",
)


def dimple(
    *, threshold: float = 0.95, steps: int | None = None, score: str = "confidence", block_length: int = 32
) -> Method:
    """Confident decoding. The original has no blocks: give `block_length` the generated length for that.

    Args:
      threshold: gamma; what scores higher is committed.
      steps: forwards of the schedule over the whole generation; None is one per token.
      score: "confidence", "margin" between the two likeliest tokens, or "entropy", negated (and so never above 0).
      block_length: S.
    """
    return Method(
        name="dimple",
        cache=NoCache(),
        rule=Confident(threshold, steps=steps, score=score),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )


@pytree
class Confident(Rule):
    """Commits what is confident, and falls back to the schedule of times 1 > t_1 > ... > t_T = `end`.

    At time t a share t of the masks of the block's entry should be left. The fallback commits what leads from the share
    that is left now to the next scheduled one that takes at least one token; the last forward commits everything.

    Attributes:
      threshold, steps, score: see `dimple`.
      end: the smallest time, epsilon.
    """

    threshold: float = 0.95
    end: float = 1e-3
    steps: int | None = static(default=None)
    score: str = static(default="confidence")

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset() if self.score == "confidence" else frozenset({self.score})

    def problems(self, spec: Spec) -> list[str]:
        found = step_problems(spec, self.steps)
        if self.score not in ("confidence", "margin", "entropy"):
            found.append(f"score={self.score!r} must be 'confidence', 'margin' or 'entropy'")
        return found

    def init(self, spec: Spec) -> jax.Array:
        """int32 `[B]`: masks of the block at its entry."""
        return jnp.zeros((spec.batch,), jnp.int32)

    def commit(self, spec: Spec, state: jax.Array, scope: Scope, canvas: Canvas, prediction: Prediction):
        left, forwards = scope.candidates.sum(axis=1, dtype=jnp.int32), steps_per_block(spec, self.steps)
        at_entry = masks_at_entry(scope, state)
        score = score_of(prediction, self.score)
        eligible = candidate_rows(scope, prediction)
        confident = eligible & (score > self.threshold)
        count = self._scheduled(forwards, left, at_entry, scope.phase)
        fallback = eligible & (rank(score, eligible) < count[:, None]) & ~confident.any(axis=1, keepdims=True)
        rest = eligible & (scope.phase >= forwards - 1)[:, None]
        return at_entry, commit_rows(prediction, reasons(confidence=confident, forced=fallback | rest), spec.length)

    def _scheduled(self, forwards: int, left: jax.Array, at_entry: jax.Array, phase: jax.Array) -> jax.Array:
        """int32 `[B]`: what the next scheduled time that takes any takes of the `left` `[B]` masks."""
        number = iota(forwards + 1)
        time = 1 + (self.end - 1) * number / forwards
        share = (left / jnp.maximum(at_entry, 1))[:, None]
        count = (left[:, None] * (1 - time / share)).astype(jnp.int32)
        count = jnp.where(number == forwards, left[:, None], count)
        fits = (number > phase[:, None]) & (time < share) & (count >= 1)
        return jnp.max(jnp.where(jnp.cumsum(fits, axis=1) == 1, jnp.where(fits, count, 0), 0), axis=1)
