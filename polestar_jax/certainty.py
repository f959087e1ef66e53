"""d2Cache's certainty prior (arXiv 2509.23094, section 4): a token is surer the more of its neighbours are decoded."""

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.commit import WrappedRule
from polestar_jax.rows import iota, take_rows
from polestar_jax.types import Canvas, CommitRule, Prediction, Scope, Spec, State, pytree


def certainty_density(decoded: jax.Array, sigma: jax.Array | float) -> jax.Array:
    """Gaussian-smoothed share of decoded tokens around every generated position, float32 `[B, G]`.

    What is left of the generation counts as decoded, what is right of it as its last position does; each side has G
    positions, and the kernel is normalised by its own sum.

    Args:
      decoded: bool `[B, G]`.
      sigma: standard deviation in positions.
    """
    length = decoded.shape[1]
    kernel = lambda distance: jnp.exp(-jnp.square(distance.astype(jnp.float32) / sigma) / 2)
    total = kernel(jnp.arange(-3 * length, 3 * length)).sum()
    distance = iota(length).T - jnp.arange(-length, 2 * length, dtype=jnp.int32)[None]
    left, inside, right = jnp.split(kernel(distance) / total, 3, axis=1)
    flags = decoded.astype(jnp.float32)
    around = jnp.einsum("ij,bj->bi", inside, flags, precision="highest")
    return around + left.sum(axis=1)[None] + flags[:, -1:] * right.sum(axis=1)[None]


@pytree
class CertaintyPrior(WrappedRule):
    """Another rule, fed with confidence times certainty density.

    Attributes:
      rule: any.
      sigma: of the density, in positions.
    """

    rule: CommitRule
    sigma: float = 10.0

    def problems(self, spec: Spec) -> list[str]:
        own = [] if self.sigma > 0 else [f"sigma={self.sigma} must be greater than 0; None is no prior"]
        return own + self.rule.problems(spec)

    def commit(self, spec: Spec, state: State, scope: Scope, canvas: Canvas, prediction: Prediction):
        density = certainty_density(~canvas.masked[:, spec.prompt_length :], self.sigma)
        score = prediction.confidence * take_rows(density, prediction.slot - spec.prompt_length)
        return self.rule.commit(spec, state, scope, canvas, dataclasses.replace(prediction, confidence=score))
