"""Attention and its drift in jnp: the definition of the ops."""

import jax
import jax.numpy as jnp

from pallas_kernels.drift_reference import NEGATIVE, DriftReference, mean_drift, pad_keys
from pallas_kernels.products import einsum32


def drift_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, key_mask: jax.Array, old: DriftReference
) -> tuple[jax.Array, jax.Array, DriftReference]:
    """See `pallas_kernels.drift_attention`."""
    probability, drift, reference = compare(score(query, key, key_mask), old)
    return weigh(probability, value), drift, reference


def attention(query: jax.Array, key: jax.Array, value: jax.Array, key_mask: jax.Array) -> jax.Array:
    """See `pallas_kernels.drift_attention.attention`."""
    return weigh(jax.nn.softmax(score(query, key, key_mask), axis=-1), value)


def weigh(probability: jax.Array, value: jax.Array) -> jax.Array:
    """Attended values `[B, R, H, A]` from `probability` `[B, H, R, M]` and `value` `[B, Hkv, M, A]`."""
    batch, heads, rows, keys = probability.shape
    weights = probability.astype(value.dtype).reshape(batch, value.shape[1], -1, rows, keys)
    return einsum32("bkgrm,bkma->brkga", weights, value).reshape(batch, rows, heads, -1).astype(value.dtype)


def score(query: jax.Array, key: jax.Array, key_mask: jax.Array) -> jax.Array:
    """Scaled scores, float32 `[B, H, R, M]`, of queries `[B, R, H, A]` and keys `[B, Hkv, M, A]`."""
    batch, rows, heads, size = query.shape
    grouped = query.reshape(batch, rows, key.shape[1], -1, size)
    scores = einsum32("brkga,bkma->bkgrm", grouped, key) * size**-0.5
    return jnp.where(key_mask[:, None, None, None, :], scores, NEGATIVE).reshape(batch, heads, rows, -1)


def compare(scores: jax.Array, old: DriftReference) -> tuple[jax.Array, jax.Array, DriftReference]:
    """Probabilities of `scores` `[B, H, R, M]`, their drift `[B, R]` from an old reference, and the new one."""
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    probability = jnp.exp(scores - log_sum[..., None])
    expected = jnp.sum(probability * (scores - old.scores[..., : scores.shape[-1]]), axis=-1)
    return probability, mean_drift(expected, log_sum, old.log_sum), DriftReference(pad_keys(scores), log_sum)
