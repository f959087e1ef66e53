"""Hierarchical decoding of dLLMs (OpenReview ZsIQUjQtdW): one token out of every run of masks, so that runs halve."""

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.card import Card
from polestar_jax.commit import Rule, candidate_rows, commit_rows, rank, reasons
from polestar_jax.head import Greedy
from polestar_jax.no_cache import NoCache
from polestar_jax.rows import iota, put_rows, take_rows
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Canvas, Method, Prediction, Scope, Spec, pytree, static

CARD = Card(
    title="Hierarchy-dLLM",
    paper="OpenReview ZsIQUjQtdW",
    reuses="nothing",
    refreshes="everything, in every forward",
    commits="confidence above `threshold`; the most confident of every run of masks above `low_threshold`; and the most"
    " confident; with `remask_threshold` tokens of the block are taken back below it, fewer than are committed",
    state="none",
    rows={"full": "N"},
    extra="none",
    twin="has no cache",
)

PRESETS = {"paper": {}, "release": {"tied": True}}
"""The public decoder commits all positions of a run that tie for the most confident."""


def hierarchy(
    preset: str = "paper",
    *,
    threshold: float = 0.9,
    low_threshold: float = 0.4,
    remask_threshold: float | None = None,
    block_length: int = 32,
) -> Method:
    """Hierarchical decoding.

    Args:
      preset: "paper", or "release" for the public decoder's treatment of ties.
      threshold: what is more confident is committed.
      low_threshold: what the best of a run of masks has to exceed.
      remask_threshold: tokens of the block are taken back where the forward is less confident than this; None for
        never.
      block_length: S.

    Raises:
      ValueError: naming an unknown preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} must be one of {', '.join(PRESETS)}")
    return Method(
        name="hierarchy" if preset == "paper" else f"hierarchy:{preset}",
        cache=NoCache(),
        rule=Hierarchy(threshold, low_threshold, remask_threshold, **PRESETS[preset]),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )


@pytree
class Hierarchy(Rule):
    """The best of every run of masks, if it is good enough.

    Attributes:
      threshold, low_threshold, remask_threshold: see `hierarchy`; all are exceeded strictly.
      tied: all positions that tie for a run's best are committed, not only the first.
    """

    threshold: float = 0.9
    low_threshold: float = 0.4
    remask_threshold: float | None = None
    tied: bool = static(default=False)

    @property
    def revokes(self) -> bool:
        return self.remask_threshold is not None

    def problems(self, spec: Spec) -> list[str]:
        return []

    def commit(self, spec: Spec, state, scope: Scope, canvas: Canvas, prediction: Prediction):
        confidence, slot = prediction.confidence, prediction.slot
        eligible = candidate_rows(scope, prediction)
        doubted = jnp.zeros_like(eligible)
        if self.remask_threshold is not None:
            inside = (slot >= scope.start[:, None]) & (slot < scope.stop[:, None])
            written = prediction.valid & inside & ~take_rows(canvas.masked, slot)
            doubted = written & (confidence < self.remask_threshold)
        open_rows = eligible | doubted
        plane = jnp.full((spec.batch, spec.length), -jnp.inf)
        best = best_of_runs(put_rows(plane, slot, confidence, open_rows), tied=self.tied)
        chosen = take_rows(best, slot) & (confidence > self.low_threshold)
        chosen = open_rows & (chosen | (confidence > self.threshold))
        # One more than is taken back, so that every forward gets on.
        lacking = doubted.sum(axis=1) + 1 - chosen.sum(axis=1)
        rest = open_rows & ~chosen
        forced = rest & (rank(confidence, rest) < lacking[:, None])
        commits = commit_rows(prediction, reasons(confidence=chosen, forced=forced), spec.length)
        return state, dataclasses.replace(commits, revoke=put_rows(commits.revoke, slot, doubted, doubted))


def best_of_runs(score: jax.Array, *, tied: bool) -> jax.Array:
    """bool `[B, N]`: the highest of every run of neighbours, the first one or all `tied` ones.

    Args:
      score: `[B, N]`, -inf between the runs.
    """
    batch, length = score.shape
    inside = score > -jnp.inf
    before = jnp.pad(inside[:, :-1], ((0, 0), (1, 0)))
    run = jnp.cumsum(inside & ~before, axis=1)  # the -inf after a run count as its own and win nothing
    row = iota(batch).T
    top = jnp.full((batch, length + 1), -jnp.inf).at[row, run].max(score)
    best = inside & (score == take_rows(top, run))
    if tied:
        return best
    slot = jnp.broadcast_to(iota(length), score.shape)
    first = jnp.full((batch, length + 1), length).at[row, run].min(jnp.where(best, slot, length))
    return best & (slot == take_rows(first, run))
