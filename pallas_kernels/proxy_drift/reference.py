"""Proxy drift in jnp: the definition of the op."""

import jax
import jax.numpy as jnp

from pallas_kernels.drift_attention.reference import compare, score
from pallas_kernels.drift_reference import DriftReference


def proxy_drift(
    query: jax.Array, key: jax.Array, cosine: jax.Array, sine: jax.Array, key_mask: jax.Array, old: DriftReference
) -> tuple[jax.Array, DriftReference]:
    """See `pallas_kernels.proxy_drift`."""
    _, drift, reference = compare(score(query, unrotate(key, cosine, sine), key_mask), old)
    return drift, reference


def unrotate(key: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Keys `[B, Hkv, M, A]` turned back, in float32, and rounded to their own dtype."""
    low, high = jnp.split(key.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return jnp.concatenate([low * cosine + high * sine, high * cosine - low * sine], axis=-1).astype(key.dtype)
