"""Block schedules: which positions are decoded together, and in which order."""

import jax
import jax.numpy as jnp

from polestar_jax.rows import iota
from polestar_jax.types import Canvas, Prediction, Scope, Spec, pytree, static


@pytree
class Blocks:
    """The state of `SemiAutoregressive`: the current block of every batch row.

    Attributes:
      index: int32 `[B]`.
      phase: int32 `[B]`, forwards spent in it.
    """

    index: jax.Array
    phase: jax.Array


@pytree
class SemiAutoregressive:
    """Blocks of fixed length from left to right; a block without masks is skipped without a forward.

    Attributes:
      block_length: S; G must be a multiple of it. None is one block, the whole generation.
      steps: forwards for the whole generation, shared out evenly: a block ends after its share, even with masks left.
        None is until no mask is left.
    """

    block_length: int | None = static()
    steps: int | None = static(default=None)

    def problems(self, spec: Spec) -> list[str]:
        if self.steps is not None and (found := step_problems(spec, self.steps)):
            return found
        if self.block_length is None:
            return []
        if self.block_length < 1:
            return [f"block_length={self.block_length} must be at least 1"]
        if spec.gen_length % self.block_length:
            return [f"gen_length={spec.gen_length} must be a multiple of block_length={self.block_length}"]
        return []

    def span(self, gen_length: int) -> int:
        return gen_length if self.block_length is None else self.block_length

    def max_forwards(self, gen_length: int) -> int:
        """G: every forward commits a token or ends a block; or `steps`."""
        return gen_length if self.steps is None else self.steps

    def init(self, spec: Spec) -> Blocks:
        zeros = jnp.zeros((spec.batch,), jnp.int32)
        return Blocks(zeros, zeros)

    def _open_block(self, spec: Spec, index: jax.Array, canvas: Canvas) -> jax.Array:
        """int32 `[B]`: the first block with a mask left, from `index` on; `index` itself if there is none."""
        open_blocks = canvas.masked[:, spec.prompt_length :].reshape(spec.batch, -1, spec.span).any(-1)
        number = iota(open_blocks.shape[1])
        following = jnp.argmax(open_blocks & (number >= index[:, None]), axis=1).astype(jnp.int32)
        return jnp.maximum(following, index)

    def scope(self, spec: Spec, state: Blocks, canvas: Canvas, keys: jax.Array) -> Scope:
        # Only the first block of all may have no mask at its entry: `advance` skips the others.
        index = jnp.where(state.phase == 0, self._open_block(spec, state.index, canvas), state.index)
        start = spec.prompt_length + index * spec.span
        stop = start + spec.span
        slot = iota(spec.length)
        inside = (slot >= start[:, None]) & (slot < stop[:, None])
        return Scope(
            index=index,
            start=start,
            stop=stop,
            candidates=canvas.masked & inside,
            visible=canvas.valid,
            entering=state.phase == 0,
            phase=state.phase,
            keys=keys,
        )

    def observe(self, spec: Spec, state: Blocks, scope: Scope, prediction: Prediction) -> tuple[Blocks, Scope]:
        return state, scope

    def advance(self, spec: Spec, state: Blocks, scope: Scope, canvas: Canvas) -> Blocks:
        over = 0 if self.steps is None else scope.phase + 1 >= steps_per_block(spec, self.steps)
        index = jnp.minimum(self._open_block(spec, scope.index + over, canvas), spec.gen_length // spec.span - 1)
        return Blocks(index, jnp.where(index == scope.index, scope.phase + 1, 0))


def step_problems(spec: Spec, steps: int | None) -> list[str]:
    """What is wrong with `steps` forwards for the whole generation, shared out evenly among its blocks."""
    blocks, steps = max(spec.gen_length // max(spec.span, 1), 1), spec.gen_length if steps is None else steps
    if steps % blocks or not 0 < steps <= spec.gen_length:
        return [
            f"steps={steps} must be a multiple of the {blocks} blocks and between {blocks} and"
            f" gen_length={spec.gen_length}"
        ]
    return []


def steps_per_block(spec: Spec, steps: int | None) -> int:
    """Forwards of a block; one per token if `steps` is None."""
    return spec.span if steps is None else steps * spec.span // spec.gen_length


def masks_at_entry(scope: Scope, state: jax.Array) -> jax.Array:
    """int32 `[B]`: the masks of the block when it was entered, which `state` remembers."""
    return jnp.where(scope.entering, scope.candidates.sum(axis=1, dtype=jnp.int32), state)
