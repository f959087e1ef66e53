"""LocalLeap (arXiv 2510.07081): near a confident token its neighbours need less confidence."""

import jax
import jax.numpy as jnp

from polestar_jax.card import Card
from polestar_jax.commit import Rule, candidate_rows, commit_rows, most_confident, reasons
from polestar_jax.head import Greedy
from polestar_jax.no_cache import NoCache
from polestar_jax.rows import iota, put_rows, take_rows
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Canvas, Method, Prediction, Scope, Spec, pytree

CARD = Card(
    title="LocalLeap",
    paper="2510.07081",
    reuses="nothing",
    refreshes="everything, in every forward",
    commits="anchors, of confidence at least `threshold`; what is within `radius` of one with at least `relaxed`; and"
    " the most confident",
    state="none",
    rows={"full": "N"},
    extra="none",
    twin="`parallel`, with `relaxed` as high as `threshold`; has no cache",
)


def localleap(*, threshold: float = 0.9, relaxed: float = 0.75, radius: int = 4, block_length: int = 32) -> Method:
    """LocalLeap.

    Args:
      threshold: confidence of an anchor.
      relaxed: confidence that is enough near an anchor; 0.75 for LLaDA, 0.8 for Dream.
      radius: how far, in positions, an anchor reaches.
      block_length: S.
    """
    return Method(
        name="localleap",
        cache=NoCache(),
        rule=LocalLeap(threshold, relaxed, radius),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )


@pytree
class LocalLeap(Rule):
    """A relaxed threshold around anchors; attributes as in `localleap`."""

    threshold: float = 0.9
    relaxed: float = 0.75
    radius: float = 4.0

    def problems(self, spec: Spec) -> list[str]:
        return [] if self.radius >= 0 else [f"radius={self.radius} must be at least 0"]

    def commit(self, spec: Spec, state, scope: Scope, canvas: Canvas, prediction: Prediction):
        confidence = prediction.confidence
        eligible = candidate_rows(scope, prediction)
        anchors = eligible & (confidence >= self.threshold)
        plane = put_rows(jnp.zeros((spec.batch, spec.length), bool), prediction.slot, anchors, anchors)
        near = take_rows(within(plane, jnp.asarray(self.radius, jnp.int32)), prediction.slot)
        chosen = anchors | (eligible & near & (confidence >= self.relaxed))
        code = reasons(confidence=chosen, forced=most_confident(confidence, eligible))
        return state, commit_rows(prediction, code, spec.length)


def within(plane: jax.Array, radius: jax.Array) -> jax.Array:
    """bool `[B, N]`: whether `plane` `[B, N]` is true at most `radius` `[]` away."""
    length = plane.shape[1]
    count = jnp.pad(jnp.cumsum(plane, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))  # true ones before a slot
    last, first = jnp.minimum(iota(length) + radius + 1, length), jnp.maximum(iota(length) - radius, 0)
    take = lambda slot: take_rows(count, jnp.broadcast_to(slot, plane.shape))
    return take(last) > take(first)
