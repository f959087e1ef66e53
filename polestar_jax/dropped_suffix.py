"""A block schedule under which every block sees only some of the masks that follow it (DPad)."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from polestar_jax.commit import rank
from polestar_jax.rows import iota, take_rows
from polestar_jax.schedule import Blocks, SemiAutoregressive
from polestar_jax.types import Canvas, Prediction, Scope, Spec, pytree, static

PURPOSE = 1  # folded into a forward's key: a sampler's draws are others


@pytree
class SuffixState:
    """The blocks, and the suffix of the current one.

    Attributes:
      blocks: see `Blocks`.
      kept: bool `[B, G]`, generated positions that the block sees, if they are after it.
    """

    blocks: Blocks
    kept: jax.Array


@pytree
class DroppedSuffix:
    """Blocks of fixed length, each with a random suffix, drawn at its entry; the rest is neither computed nor seen.

    A position d after the block's end is kept with probability scale * phi(decay * d / (window - 1)), phi being the
    density of the standard normal distribution ("gaussian"), or it is one of `preserved` random ones ("uniform"); in
    both cases only if d < window.

    Attributes:
      blocks: the blocks.
      scale, decay: of "gaussian".
      preserved: of "uniform".
      window: how far the suffix reaches.
      draw: "gaussian" or "uniform".
      kept: bool `[B, blocks, G]`, recorded choices instead of drawn ones; None draws.
    """

    blocks: SemiAutoregressive
    scale: float = 2.0
    decay: float = 4.0
    preserved: float = 64.0
    window: float = 256.0
    draw: str = static(default="gaussian")
    kept: jax.Array | None = None

    def problems(self, spec: Spec) -> list[str]:
        found = self.blocks.problems(spec)
        highest = math.sqrt(2 * math.pi)
        if not 0 <= self.scale <= highest:
            found.append(f"scale={self.scale} must be between 0 and {highest:.3f}, or it is no scale of probabilities")
        if self.window < 0 or self.preserved < 0:
            found.append(f"window={self.window} and preserved={self.preserved} must be at least 0")
        if self.draw not in ("gaussian", "uniform"):
            found.append(f"draw={self.draw!r} must be 'gaussian' or 'uniform'")
        return found

    def span(self, gen_length: int) -> int:
        return self.blocks.span(gen_length)

    def max_forwards(self, gen_length: int) -> int:
        return self.blocks.max_forwards(gen_length)

    def init(self, spec: Spec) -> SuffixState:
        return SuffixState(self.blocks.init(spec), jnp.zeros((spec.batch, spec.gen_length), bool))

    def scope(self, spec: Spec, state: SuffixState, canvas: Canvas, keys: jax.Array) -> Scope:
        scope = self.blocks.scope(spec, state.blocks, canvas, keys)
        kept = jnp.where(scope.entering[:, None], self._choose(spec, scope), state.kept)
        kept = jnp.pad(kept, ((0, 0), (spec.prompt_length, 0)))
        return dataclasses.replace(scope, visible=scope.visible & ((iota(spec.length) < scope.stop[:, None]) | kept))

    def _choose(self, spec: Spec, scope: Scope) -> jax.Array:
        """bool `[B, G]`."""
        if self.kept is not None:
            return take_rows(self.kept, scope.index[:, None])[:, 0]
        uniform = lambda key: jax.random.uniform(jax.random.fold_in(key, PURPOSE), (spec.gen_length,))
        drawn = jax.vmap(uniform)(scope.keys)
        distance = spec.prompt_length + iota(spec.gen_length) - scope.stop[:, None]
        near = (distance >= 0) & (distance < self.window)
        if self.draw == "uniform":
            return near & (rank(drawn, near) < self.preserved)
        x = self.decay * distance / jnp.maximum(jnp.asarray(self.window) - 1, 1)
        return near & (drawn < self.scale / math.sqrt(2 * math.pi) * jnp.exp(-0.5 * x**2))

    def observe(
        self, spec: Spec, state: SuffixState, scope: Scope, prediction: Prediction
    ) -> tuple[SuffixState, Scope]:
        return dataclasses.replace(state, kept=scope.visible[:, spec.prompt_length :]), scope

    def advance(self, spec: Spec, state: SuffixState, scope: Scope, canvas: Canvas) -> SuffixState:
        return dataclasses.replace(state, blocks=self.blocks.advance(spec, state.blocks, scope, canvas))
