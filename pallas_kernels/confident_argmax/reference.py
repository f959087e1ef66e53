"""Confident arg max in jnp: the definition of the op."""

import jax
import jax.numpy as jnp

from pallas_kernels.products import einsum32


def confident_argmax(
    hidden: jax.Array, norm: jax.Array, head: jax.Array, epsilon: float, mask_id: int | None
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.confident_argmax`."""
    logits = einsum32("rd,vd->rv", normalize(hidden, norm, epsilon), head)
    word = jnp.arange(head.shape[0], dtype=jnp.int32)[None]
    allowed = logits if mask_id is None else jnp.where(word == mask_id, -jnp.inf, logits)
    token = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    best = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token, jnp.exp(best - jax.nn.logsumexp(logits, axis=-1))


def normalize(hidden: jax.Array, norm: jax.Array, epsilon: float) -> jax.Array:
    """RMS norm in float32, rounded before and after the weight as the models do."""
    wide = hidden.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return wide.astype(hidden.dtype) * norm[None]
