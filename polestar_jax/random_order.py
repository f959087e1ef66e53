"""Blocks whose positions are committed in an order that is known in advance: a drawn one, or one that is given."""

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.commit import Quota, Rule, candidate_rows, commit_rows, quota_of, rank, reasons
from polestar_jax.rows import iota, put_rows
from polestar_jax.schedule import Blocks, SemiAutoregressive
from polestar_jax.types import Canvas, Prediction, Scope, Spec, pytree, static


@pytree
class OrderedBlocks:
    """The state of `RandomOrder`.

    Attributes:
      blocks: see `Blocks`.
      score: float32 `[B, G]`; the highest is committed first.
      masks: int32 `[B]`, masks of the block at its entry.
    """

    blocks: Blocks
    score: jax.Array
    masks: jax.Array


@pytree
class RandomOrder:
    """Fixed blocks; what a forward commits is settled before it runs: the next masks in the block's order.

    Attributes:
      block_length: S; G must be a multiple of it.
      steps: forwards for the whole generation, as in `Quota`; None is one per token.
      order: int32 `[B, G]`, generated positions in the order in which to commit them; None draws one at every entry.
    """

    block_length: int = static()
    steps: int | None = static(default=None)
    order: jax.Array | None = None

    @property
    def _base(self) -> SemiAutoregressive:
        return SemiAutoregressive(block_length=self.block_length)

    def problems(self, spec: Spec) -> list[str]:
        return self._base.problems(spec) or Quota(steps=self.steps).problems(spec)

    def span(self, gen_length: int) -> int:
        return self._base.span(gen_length)

    def max_forwards(self, gen_length: int) -> int:
        return self._base.max_forwards(gen_length)

    def forwards_per_block(self, gen_length: int) -> int:
        return (gen_length if self.steps is None else self.steps) * self.block_length // gen_length

    def init(self, spec: Spec) -> OrderedBlocks:
        score = jnp.zeros((spec.batch, spec.gen_length), jnp.float32)
        return OrderedBlocks(self._base.init(spec), score, jnp.zeros((spec.batch,), jnp.int32))

    def _score(self, spec: Spec, state: OrderedBlocks, scope: Scope) -> jax.Array:
        """float32 `[B, G]`: the state's, or at an entry a new one."""
        if self.order is None:
            fresh = jax.vmap(lambda key: jax.random.uniform(key, (spec.gen_length,)))(scope.keys)
        else:
            place = -jnp.broadcast_to(jnp.arange(spec.gen_length, dtype=jnp.float32), self.order.shape)
            fresh = put_rows(jnp.zeros_like(place), self.order, place, self.order >= 0)
        return jnp.where(scope.entering[:, None], fresh, state.score)

    def scope(self, spec: Spec, state: OrderedBlocks, canvas: Canvas, keys: jax.Array) -> Scope:
        scope = self._base.scope(spec, state.blocks, canvas, keys)
        masks = jnp.where(scope.entering, scope.candidates.sum(axis=1, dtype=jnp.int32), state.masks)
        quota = quota_of(masks, self.forwards_per_block(spec.gen_length), scope.phase)
        score = jnp.pad(self._score(spec, state, scope), ((0, 0), (spec.prompt_length, 0)))
        chosen = scope.candidates & (rank(score, scope.candidates) < quota[:, None])
        return dataclasses.replace(scope, candidates=chosen)

    def observe(self, spec: Spec, state: OrderedBlocks, scope: Scope, prediction: Prediction):
        return state, scope

    def advance(self, spec: Spec, state: OrderedBlocks, scope: Scope, canvas: Canvas) -> OrderedBlocks:
        inside = (iota(spec.length) >= scope.start[:, None]) & (iota(spec.length) < scope.stop[:, None])
        before = scope.candidates | canvas.masked & inside  # what the forward chose is committed by now
        masks = jnp.where(scope.entering, before.sum(axis=1, dtype=jnp.int32), state.masks)
        blocks = self._base.advance(spec, state.blocks, scope, canvas)
        return OrderedBlocks(blocks, self._score(spec, state, scope), masks)


@pytree
class EveryCandidate(Rule):
    """Commits whatever may be committed: for schedules that choose."""

    def problems(self, spec: Spec) -> list[str]:
        return []

    def commit(self, spec: Spec, state, scope: Scope, canvas: Canvas, prediction: Prediction):
        return state, commit_rows(prediction, reasons(forced=candidate_rows(scope, prediction)), spec.length)
