"""WINO (OpenReview XtLQHlNLxy): commits widely, and takes back what a shadow block does not confirm."""

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.card import Card
from polestar_jax.commit import Rule, candidate_rows, commit_rows, most_confident, rank, reasons
from polestar_jax.head import Greedy
from polestar_jax.rows import put_rows, take_rows
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.shadow import ShadowBlock
from polestar_jax.types import Canvas, Method, Prediction, Scope, Signal, Spec, pytree, static

CARD = Card(
    title="WINO",
    paper="OpenReview XtLQHlNLxy",
    reuses="nothing",
    refreshes="everything, in every forward",
    commits="confidence above `threshold`, at most 0.7 of the block's masks (5 to 20), and the most confident; takes"
    " back what the shadow gives less than `threshold_back`, fewer than were committed",
    state="number of tokens that the last forward committed",
    rows={"full": "N + S"},
    extra="LM head on the S rows of the shadow",
    twin="`parallel`, with `threshold_back` 0 and at most 20 masks in a block; has no cache",
)


def wino(*, threshold: float = 0.6, threshold_back: float = 0.9, bound: str = "last", block_length: int = 32) -> Method:
    """WINO: wide in, narrow out.

    Args:
      threshold: tau_1, what more confident predictions are committed.
      threshold_back: tau_2, what a token's probability under the shadow must not fall below.
      bound: fewer tokens are taken back than were committed by the "last" forward, as the authors' code has it, or are
        "now", as d2Cache's port has it.
      block_length: S; the original's 128.
    """
    return Method(
        name="wino",
        cache=ShadowBlock(),
        rule=Wino(threshold, threshold_back, bound=bound),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )


@pytree
class Wino(Rule):
    """Wide in, narrow out.

    With n_t commits in the t-th forward of a block, at most n_(t-1) - 1 are taken back ("last"): after t forwards at
    least n_t + t - 1 stand, and a block of S ends within S forwards. A single one may lose more than it gains.

    Attributes:
      threshold, threshold_back, bound: see `wino`.
      share, least, most: caps of the commits of one forward.
      first: what the forward before a block's first counts as.
    """

    threshold: float = 0.6
    threshold_back: float = 0.9
    share: float = 0.7
    least: float = 5.0
    most: float = 20.0
    first: float = 30.0
    bound: str = static(default="last")

    revokes = True

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({"shadow"})

    @property
    def progresses(self) -> bool:
        return self.bound == "now"

    def problems(self, spec: Spec) -> list[str]:
        return [] if self.bound in ("last", "now") else [f"bound={self.bound!r} must be 'last' or 'now'"]

    def init(self, spec: Spec) -> jax.Array:
        """int32 `[B]`: tokens that the last forward committed."""
        return jnp.zeros((spec.batch,), jnp.int32)

    def commit(self, spec: Spec, state: jax.Array, scope: Scope, canvas: Canvas, prediction: Prediction):
        confidence, slot, shadow = prediction.confidence, prediction.slot, prediction.extra["shadow"]
        eligible = candidate_rows(scope, prediction)
        masks = scope.candidates.sum(axis=1)
        most = jnp.clip(jnp.floor(masks * self.share), self.least, self.most)
        wide = eligible & (confidence > self.threshold) & (rank(confidence, eligible) < most[:, None])
        code = reasons(confidence=wide, forced=most_confident(confidence, eligible))
        count = (code > 0).sum(axis=1, dtype=jnp.int32)

        inside = (slot >= scope.start[:, None]) & (slot < scope.stop[:, None])
        doubted = prediction.valid & inside & ~take_rows(canvas.masked, slot) & (shadow < self.threshold_back)
        last = jnp.where(scope.entering, self.first, state) if self.bound == "last" else count
        narrow = doubted & (rank(-shadow, doubted) < last[:, None] - 1) & (count > 1)[:, None]
        commits = commit_rows(prediction, code, spec.length)
        return count, dataclasses.replace(commits, revoke=put_rows(commits.revoke, slot, narrow, narrow))
