"""DAWN's commit rule: a graph of who attends to whom decides what may be committed together (arXiv 2602.06953)."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from polestar_jax.attention_signals import ATTENTION
from polestar_jax.commit import Rule, candidate_rows, commit_rows, most_confident, reasons
from polestar_jax.rows import iota, put_rows
from polestar_jax.types import Canvas, Prediction, Scope, Signal, Spec, pytree, static

Anchors = Literal["committed", "current"]
Exclusion = Literal["neighbours", "induced"]


@pytree
class Dependency(Rule):
    """Sure candidates, those that depend on sure neighbours, and independent ones of the rest (section 4).

    With A the attention averaged over heads and the last layers, an edge j -> i says that A[i, j] >= tau_edge, unless j
    is a sink (mean of A's column j > tau_sink) or i itself. Committed are candidates

    * with confidence >= tau_high;
    * with confidence >= tau_induce and an edge from an anchor: a known token of confidence >= tau_high;
    * of the others with confidence >= tau_low, and no edge to or from what is committed above, greedily by confidence,
      those without an edge between them;
    * and the most confident one if that is nobody.

    Attributes:
      tau_high, tau_induce, tau_low: confidences.
      tau_sink, tau_edge: attention.
      anchors: confidence of a known token: "committed", the one it was committed with, 1 for the prompt (the paper); or
        "current", that of what the model predicts there now, before the block's end (the released code).
      exclusion: what keeps a candidate out of the third group: an edge, in either direction, with any of the first two
        ("neighbours", algorithm 1 of the paper); or one from a position that is in both ("induced", the released code).
    """

    tau_high: float = 0.9
    tau_induce: float = 0.7
    tau_sink: float = 0.01
    tau_edge: float = 0.07
    tau_low: float = 0.75
    anchors: Anchors = static(default="committed")
    exclusion: Exclusion = static(default="neighbours")

    @property
    def needs(self) -> frozenset[Signal]:
        return ATTENTION | ({"slot_confidence"} if self.anchors == "current" else set())

    def problems(self, spec: Spec) -> list[str]:
        found = []
        for name, kind in (("anchors", Anchors), ("exclusion", Exclusion)):
            if getattr(self, name) not in get_args(kind):
                found.append(f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(kind))}")
        return found

    def init(self, spec: Spec) -> jax.Array | tuple[()]:
        """float32 `[B, N]`: the confidence that every token was committed with; nothing if anchors are "current"."""
        if self.anchors == "current":
            return ()
        prompt = iota(spec.length) < spec.prompt_length
        return jnp.broadcast_to(prompt, (spec.batch, spec.length)).astype(jnp.float32)

    def commit(self, spec: Spec, state, scope: Scope, canvas: Canvas, prediction: Prediction):
        eligible, confidence = candidate_rows(scope, prediction), prediction.confidence
        edges = self._edges(prediction)
        between = jnp.take_along_axis(edges, jnp.clip(prediction.slot, 0, spec.length - 1)[:, None, :], axis=2)
        sure = eligible & (confidence >= self.tau_high)
        anchor = self._anchors(spec, state, scope, canvas, prediction)
        induced = eligible & (confidence >= self.tau_induce) & (edges & anchor[:, None]).any(axis=2)
        either_way = between | between.swapaxes(1, 2)
        if self.exclusion == "neighbours":
            excluded = (either_way & (sure | induced)[:, None]).any(axis=2)
        else:
            excluded = (between & (sure & induced)[:, None]).any(axis=2)
        rest = eligible & (confidence >= self.tau_low) & ~sure & ~induced & ~excluded
        independent = independent_set(either_way, confidence, rest)
        nobody = ~(sure | induced | independent).any(axis=1, keepdims=True)
        forced = most_confident(confidence, eligible) & nobody
        code = reasons(confidence=sure, dependency=induced | independent, forced=forced)
        if self.anchors == "committed":
            state = put_rows(state, prediction.slot, confidence, code > 0)
        return state, commit_rows(prediction, code, spec.length)

    def _edges(self, prediction: Prediction) -> jax.Array:
        """bool `[B, R, N]`: whether predicted position r depends on slot n."""
        attention = prediction.extra["attention"]
        sink = prediction.planes["attention_received"] > self.tau_sink
        itself = iota(attention.shape[2])[None] == prediction.slot[..., None]
        return (attention >= self.tau_edge) & ~sink[:, None] & ~itself

    def _anchors(self, spec: Spec, state, scope: Scope, canvas: Canvas, prediction: Prediction) -> jax.Array:
        """bool `[B, N]`."""
        known = canvas.valid & ~canvas.masked
        if self.anchors == "committed":
            return known & (state >= self.tau_high)
        before = iota(spec.length) < scope.stop[:, None]
        return known & before & (prediction.planes["slot_confidence"] >= self.tau_high)


def independent_set(edges: jax.Array, score: jax.Array, eligible: jax.Array) -> jax.Array:
    """bool `[B, R]`: eligible rows without an edge between them, chosen greedily by score, the first of equals.

    Args:
      edges: bool `[B, R, R]`, symmetric.
      score: float32 `[B, R]`.
      eligible: bool `[B, R]`.
    """

    def add(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chosen, left = state
        best = most_confident(score, left)
        neighbours = (edges & best[:, None]).any(axis=2)
        return chosen | best, left & ~best & ~neighbours

    start = (jnp.zeros_like(eligible), eligible)
    return jax.lax.while_loop(lambda state: state[1].any(), add, start)[0]
