"""Merging what blocks found in their parts of the vocabulary."""

import jax
import jax.numpy as jnp


def merge(largest: jax.Array, total: jax.Array, best: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Arg max and probability `[R]`.

    Args:
      largest: maximum of each part's logits, float32 `[P, R]`.
      total: sum of exp(logit - largest).
      best: maximum of those that may win.
      token: int32, the first word that has it; parts are in the order of the words.
    """
    top = jnp.max(largest, axis=0)
    whole = jnp.sum(jnp.exp(largest - top[None]) * total, axis=0)
    winner = jnp.argmax(best, axis=0)[None]
    pick = lambda part: jnp.take_along_axis(part, winner, axis=0)[0]
    return pick(token), jnp.exp(pick(best) - top) / whole
