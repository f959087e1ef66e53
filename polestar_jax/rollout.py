"""Attention rollout over the rows of a forward, and the rows it calls important (d2Cache, arXiv 2509.23094)."""

import jax
import jax.numpy as jnp

from polestar_jax.commit import rank
from polestar_jax.rows import iota, put_rows, take_rows


def rollout_importance(attention: list[jax.Array], slot: jax.Array, valid: jax.Array, counted: jax.Array) -> jax.Array:
    """Column sums of the rollout M_L ... M_1, float32 `[B, N]`: how much all positions take from each.

    M_l is (A_l + I) / 2 in the rows of the forward, I elsewhere. Only the sums are wanted, so one vector goes from the
    last layer to the first and no `[N, N]` product is formed.

    Args:
      attention: per layer float32 `[B, R, N]`, mean over heads.
      slot, valid: `[B, R]`, the rows of the forward.
      counted: bool `[B, N]`, positions whose rows are summed (pads are not).
    """
    weight = counted.astype(jnp.float32)
    for layer in reversed(attention):
        half = jnp.where(valid, take_rows(weight, slot), 0.0) / 2
        weight = put_rows(weight, slot, half, valid)
        weight = weight + jnp.einsum("br,brn->bn", half, layer, precision="highest")
    return weight


def nucleus(importance: jax.Array, eligible: jax.Array, share: jax.Array | float) -> jax.Array:
    """bool `[B, N]`: the most important eligible positions that together have at most `share` of all, at least one.

    A share of 1 is all of them, whatever the rounding.
    """
    score = jnp.where(eligible, importance, 0.0)
    probability = score / (score.sum(axis=1, keepdims=True) + 1e-9)
    place = rank(probability, eligible)
    order = jnp.argsort(place, axis=1)
    together = take_rows(jnp.cumsum(take_rows(probability, order), axis=1), place)
    return eligible & ((together <= share) | (place == 0) | (share >= 1))


def fill_gaps(plane: jax.Array, width: jax.Array | float) -> jax.Array:
    """bool `[B, N]`: `plane`, and what lies between two of its neighbours that are at most `width` apart."""
    length = plane.shape[1]
    here = jnp.broadcast_to(iota(length), plane.shape)
    before = jax.lax.cummax(jnp.where(plane, here, -1), axis=1)
    after = jax.lax.cummin(jnp.where(plane, here, length), axis=1, reverse=True)
    return plane | ((before >= 0) & (after < length) & (after - before <= width))
