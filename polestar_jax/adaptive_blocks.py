"""Blocks that end where the entry's own predictions end a sentence (AdaBlock-dLLM, arXiv 2509.26432, section 4)."""

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.rows import iota
from polestar_jax.types import Canvas, Prediction, Scope, Spec, pytree, static


@pytree
class Extent:
    """The state of `AdaptiveBlocks`: the current block of every batch row.

    Attributes:
      index: int32 `[B]`.
      start, stop: int32 `[B]`, its slots; `stop` is settled by the block's entry.
      phase: int32 `[B]`, forwards spent in it.
    """

    index: jax.Array
    start: jax.Array
    stop: jax.Array
    phase: jax.Array


@pytree
class AdaptiveBlocks:
    """Blocks from left to right, each as long as its entry decides.

    The entry predicts S = max(`base_length`, floor(`window` G)) positions. If the most confident delimiter among the
    first floor(`window` G) predictions has at least `delimiter_threshold`, the block ends with it (the first of equals;
    a block of one token is legal); else it has `base_length` positions, or what is left of the generation.

    Attributes:
      delimiters: token ids that end a block.
      delimiter_threshold: tau_D; infinity gives blocks of fixed length.
      base_length: B_0, any length: G need not be a multiple of it.
      window: the part of G in which a delimiter is looked for.
    """

    delimiter_threshold: float
    delimiters: tuple[int, ...] = static()
    base_length: int = static(default=32)
    window: float = static(default=0.25)

    def problems(self, spec: Spec) -> list[str]:
        found, size = [], spec.model.config.vocab_size
        if self.base_length < 1:
            found.append(f"base_length={self.base_length} must be at least 1")
        if not 0 <= self.window <= 1:
            found.append(f"window={self.window} must be between 0 and 1")
        if outside := [token for token in self.delimiters if not 0 <= token < size]:
            found.append(
                f"delimiters={outside} are no ids of a vocabulary of {size}; give those of this model's tokenizer"
            )
        if not self.delimiters:
            found.append("delimiters is empty; give the ids of tokens that end a sentence or a line")
        return found

    def span(self, gen_length: int) -> int:
        return max(min(self.base_length, gen_length), self._window(gen_length))

    def max_forwards(self, gen_length: int) -> int:
        """G: every forward commits a token."""
        return gen_length

    def _window(self, gen_length: int) -> int:
        return int(self.window * gen_length)

    def init(self, spec: Spec) -> Extent:
        zeros = jnp.zeros((spec.batch,), jnp.int32)
        start = jnp.full_like(zeros, spec.prompt_length)
        return Extent(zeros, start, start, zeros)

    def scope(self, spec: Spec, state: Extent, canvas: Canvas, keys: jax.Array) -> Scope:
        entering = state.phase == 0
        left = canvas.masked & (iota(spec.length) >= state.start[:, None])
        # Tokens that are there already, forced ones or a rule's own, are no part of a block that begins with them.
        first = jnp.where(left.any(axis=1), jnp.argmax(left, axis=1).astype(jnp.int32), state.start)
        start = jnp.where(entering, first, state.start)
        farthest = jnp.minimum(start + spec.span, spec.length)
        scope = Scope(
            index=state.index,
            start=start,
            stop=jnp.where(entering, farthest, state.stop),
            candidates=canvas.masked,
            visible=canvas.valid,
            entering=entering,
            phase=state.phase,
            keys=keys,
        )
        return _limited(spec, scope)

    def observe(self, spec: Spec, state: Extent, scope: Scope, prediction: Prediction) -> tuple[Extent, Scope]:
        """Settles the block's end, at its entry."""
        start = scope.start[:, None]
        inside = prediction.valid & (prediction.slot >= start)
        inside = inside & (prediction.slot < start + self._window(spec.gen_length))
        delimiter = jnp.isin(prediction.token, jnp.asarray(self.delimiters, jnp.int32)) & inside
        confidence = jnp.where(delimiter, prediction.confidence, -jnp.inf)
        best = jnp.argmax(confidence, axis=1, keepdims=True)
        sure = (jnp.max(confidence, axis=1) >= self.delimiter_threshold) & delimiter.any(axis=1)
        after = jnp.take_along_axis(prediction.slot, best, axis=1)[:, 0] + 1
        usual = jnp.minimum(scope.start + self.base_length, spec.length)
        stop = jnp.where(scope.entering, jnp.where(sure, after, usual), scope.stop)
        return dataclasses.replace(state, stop=stop), _limited(spec, dataclasses.replace(scope, stop=stop))

    def advance(self, spec: Spec, state: Extent, scope: Scope, canvas: Canvas) -> Extent:
        slot = iota(spec.length)
        inside = (slot >= scope.start[:, None]) & (slot < scope.stop[:, None])
        done = ~(canvas.masked & inside).any(axis=1)
        return Extent(
            index=scope.index + done,
            start=jnp.where(done, scope.stop, scope.start),
            stop=scope.stop,
            phase=jnp.where(done, 0, scope.phase + 1),
        )


def _limited(spec: Spec, scope: Scope) -> Scope:
    """The scope with candidates of its block only."""
    slot = iota(spec.length)
    inside = (slot >= scope.start[:, None]) & (slot < scope.stop[:, None])
    return dataclasses.replace(scope, candidates=scope.candidates & inside)
