"""EntropyCache (arXiv 2603.18489): a full forward when a token was committed unsurely, masks and new tokens otherwise.

No public code and no full text of it was at hand: the threshold, how far ahead masks are recomputed, and the commit
rule are ours.
"""

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.attention import empty_cache
from polestar_jax.card import Card
from polestar_jax.commit import confidence_rule, rank
from polestar_jax.head import Greedy
from polestar_jax.policy import Policy
from polestar_jax.rows import (
    block_slots,
    forward_canvas,
    forward_rows,
    iota,
    rows_at,
    rows_pass,
    shift_left,
    slots_of,
    take_rows,
    whole_pass,
)
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Branch, Canvas, Commits, Method, Pass, Prediction, Scope, Signal, Spec, pytree, static

CARD = Card(
    title="EntropyCache",
    paper="2603.18489",
    reuses="keys and values of every row outside this forward's row set, until the next full forward",
    refreshes="the masks of the block and of `ahead` blocks after it, and the `recent` last committed tokens;"
    " everything when a token of the last forward was committed with an entropy above `max_entropy`",
    commits="confidence at least `threshold`, and the most confident; or the factor rule",
    state="keys and values; when each position was committed",
    rows={"rows": "masks in scope + recent tokens, and rows that predict those masks", "full": "N"},
    extra="entropy of the predictions",
    twin="`parallel`: max_entropy = -inf",
)


@pytree
class Dated:
    """State of `EntropyCache`.

    Attributes:
      keys, values: rotated, per layer `[B, Hkv, N, A]`.
      committed_at: int32 `[B, N]`, the forward, from 1, that committed the position; 0 for none.
      forwards: int32 `[B]`.
      unsure: bool `[B]`, whether the next forward is a full one.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    committed_at: jax.Array
    forwards: jax.Array
    unsure: jax.Array


@pytree
class EntropyCache(Policy):
    """Rows as on the card.

    Attributes:
      max_entropy: tau_H, in nats; the first forward is a full one anyway.
      recent: k, how many of the last committed tokens are computed again.
      ahead: how many blocks after the current one have their masks computed again.
    """

    max_entropy: float
    recent: int = static(default=64)
    ahead: int = static(default=1)

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({"entropy"})

    def problems(self, spec: Spec) -> list[str]:
        return [
            f"{name}={value} must be at least 0"
            for name, value in (("recent", self.recent), ("ahead", self.ahead))
            if value < 0
        ]

    def width(self, spec: Spec) -> int:
        return spec.span + spec.model.shift

    def init(self, spec: Spec) -> Dated:
        zeros = jnp.zeros((spec.batch, spec.length), jnp.int32)
        return Dated(empty_cache(spec), empty_cache(spec), zeros, zeros[:, 0], jnp.ones((spec.batch,), bool))

    def restart(self, spec: Spec, state: Dated) -> Dated:
        return dataclasses.replace(self.init(spec), keys=state.keys, values=state.values)

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        def full(params, cache: Dated, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
            ran = forward_canvas(spec, params, canvas, scope.visible, cached=(cache.keys, cache.values, mine))
            cache = dataclasses.replace(cache, keys=ran.keys, values=ran.values)
            return whole_pass(spec, cache, canvas, scope, ran.output)

        return Branch("rows", lambda *arguments: self._rows(spec, *arguments)), Branch("full", full)

    def kind(self, spec: Spec, cache: Dated, scope: Scope) -> jax.Array:
        return cache.unsure.astype(jnp.int32)

    def wanted(self, spec: Spec, cache: Dated, canvas: Canvas, scope: Scope) -> jax.Array:
        """bool `[B, N]`: masks in scope and the rows that predict them, and the last committed tokens."""
        slot, size = iota(spec.length), scope.stop - scope.start
        reach = (scope.stop + self.ahead * size)[:, None]
        masks = canvas.masked & (slot >= scope.start[:, None]) & (slot < reach)
        committed = (cache.committed_at > 0) & ~canvas.masked
        recent = committed & (rank(cache.committed_at.astype(jnp.float32), committed) < self.recent)
        return masks | shift_left(masks, spec.model.shift) | recent

    def _rows(self, spec: Spec, params, cache: Dated, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
        wanted = self.wanted(spec, cache, canvas, scope)
        slot, block = iota(spec.length), block_slots(spec, scope)  # the block's come first: only they predict
        inside = (slot >= scope.start[:, None] - spec.model.shift) & (slot < scope.stop[:, None])
        beyond = slots_of(wanted & ~inside, min(self.ahead * spec.span + self.recent, spec.length))
        block = jnp.where((block < spec.length) & take_rows(wanted, block), block, -1)
        rows = rows_at(canvas, jnp.concatenate([block, beyond], axis=1), mine)
        ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
        cache = dataclasses.replace(cache, keys=ran.keys, values=ran.values)
        done, width = rows_pass(spec, cache, rows, ran.output), block.shape[1]
        return done._replace(hidden=done.hidden[:, :width], slot=done.slot[:, :width], valid=done.valid[:, :width])

    def observe(self, spec: Spec, cache: Dated, scope: Scope, prediction: Prediction, commits: Commits) -> Dated:
        committed = prediction.valid & take_rows(commits.write, prediction.slot)
        highest = jnp.max(jnp.where(committed, prediction.extra["entropy"], -jnp.inf), axis=1)
        forwards = cache.forwards + 1
        at = jnp.where(commits.revoke, 0, cache.committed_at)
        at = jnp.where(commits.write, forwards[:, None], at)
        # Not "above": -inf, which asks for full forwards, is not above itself where nothing was committed.
        return dataclasses.replace(
            cache,
            committed_at=at,
            forwards=forwards,
            unsure=(highest > self.max_entropy) | (self.max_entropy == -jnp.inf),
        )


def entropy_cache(
    *,
    threshold: float | None = None,
    factor: float | None = None,
    max_entropy: float = 0.5,
    recent: int = 64,
    ahead: int = 1,
    block_length: int = 32,
) -> Method:
    """EntropyCache.

    Args:
      threshold, factor: the commit rule, as in `parallel`; ours, the paper's was not found.
      max_entropy: tau_H in nats; ours.
      recent: k.
      ahead: see `EntropyCache`; ours.
      block_length: S.
    """
    return Method(
        name="entropy_cache",
        cache=EntropyCache(max_entropy=max_entropy, recent=recent, ahead=ahead),
        rule=confidence_rule(threshold, factor),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )
