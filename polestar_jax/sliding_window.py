"""The schedule of Elastic-Cache: not blocks, but the first masks, wherever they are."""

import jax
import jax.numpy as jnp

from polestar_jax.early_stop import before_eos
from polestar_jax.types import Canvas, Prediction, Scope, Spec, pytree, static


@pytree
class SlidingWindow:
    """The first `window` masks are candidates; the whole generation is one block.

    Attributes:
      window: beta, in masks.
      stop_at_eos: masks right of a committed EOS are no candidates any more.
    """

    window: int = static()
    stop_at_eos: bool = static(default=False)

    def problems(self, spec: Spec) -> list[str]:
        return [] if self.window >= 1 else [f"window={self.window} must be at least 1"]

    def span(self, gen_length: int) -> int:
        return gen_length

    def max_forwards(self, gen_length: int) -> int:
        """G: every forward commits a token."""
        return gen_length

    def init(self, spec: Spec) -> jax.Array:
        """int32 `[B]`: forwards spent."""
        return jnp.zeros((spec.batch,), jnp.int32)

    def scope(self, spec: Spec, state: jax.Array, canvas: Canvas, keys: jax.Array) -> Scope:
        eligible = canvas.masked
        if self.stop_at_eos:
            eligible = eligible & before_eos(spec, canvas.tokens, canvas.masked)
        return Scope(
            index=jnp.zeros_like(state),
            start=jnp.full_like(state, spec.prompt_length),
            stop=jnp.full_like(state, spec.length),
            candidates=first_of(eligible, self.window),
            visible=canvas.valid,
            entering=state == 0,
            phase=state,
            keys=keys,
        )

    def observe(self, spec: Spec, state: jax.Array, scope: Scope, prediction: Prediction) -> tuple[jax.Array, Scope]:
        return state, scope

    def advance(self, spec: Spec, state: jax.Array, scope: Scope, canvas: Canvas) -> jax.Array:
        return state + 1


def first_of(plane: jax.Array, count: int) -> jax.Array:
    """bool `[B, N]`: the first `count` places where `plane` is true."""
    return plane & (jnp.cumsum(plane, axis=1) <= count)
