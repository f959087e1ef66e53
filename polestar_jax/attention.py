"""Attention of a set of rows over the cache, and the cache's keys and values.

Keys and values are cached heads first, `[B, Hkv, M, A]` per layer, so that no step has to transpose them; keys are
cached rotated, because their positions never move.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import drift_attention
from pallas_kernels.implementation import Implementation
from polestar_jax.types import Model, RowSet, Spec

Look = Callable[[jax.Array], jax.Array]
"""What is kept of a layer's attention `[B, H, R, M]`: an array `[B, R, ...]`."""

CHUNK = 256
NEGATIVE = -1e30  # finite, so that a row without any key gives numbers (that nobody reads) instead of NaN


def empty_cache(spec: Spec, slots: int | None = None) -> tuple[jax.Array, ...]:
    """Zeroed keys or values, one `[B, Hkv, M, A]` per layer; M is N unless `slots` says otherwise."""
    config = spec.model.config
    shape = (spec.batch, config.kv_heads, slots or spec.length, config.model_size // config.heads)
    return tuple(jnp.zeros(shape, config.dtype) for _ in range(config.layers))


def project_rows(
    model: Model, params, layer: int, hidden: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries `[B, R, H, A]`, keys and values `[B, Hkv, R, A]`, of layer inputs `[B, R, D]`."""
    query, key, value = model.project(params, layer, hidden)
    query, key = model.rotate(query, position), model.rotate(key, position)
    return query, key.swapaxes(1, 2), value.swapaxes(1, 2)


def unrotated(model: Model, keys: jax.Array, position: jax.Array) -> jax.Array:
    """Cached keys `[B, Hkv, N, A]` without their rotary `position` `[B, N]`, as proxies see them."""
    return model.rotate(keys[..., None, :], -position[:, None, :])[..., 0, :]


def write_cache(cache: jax.Array, rows: RowSet, fresh: jax.Array, write: jax.Array | None = None) -> jax.Array:
    """`cache` `[B, Hkv, M, A]` with `fresh` `[B, Hkv, R, A]` at the slots of `rows` where `write` (or `rows.write`)."""
    write = rows.write if write is None else write
    # Rows that are not written go to slots beyond the cache, one each: a scatter whose slots differ needs no atomics.
    beyond = cache.shape[2] + jnp.arange(rows.slot.shape[1], dtype=jnp.int32)
    target = jnp.where(write & (rows.slot >= 0), rows.slot, beyond)
    put = jax.vmap(lambda plane, index, values: plane.at[:, index].set(values, mode="drop", unique_indices=True))
    return put(cache, target, fresh.astype(cache.dtype))


def attention_scores(query: jax.Array, key: jax.Array, key_mask: jax.Array) -> jax.Array:
    """Scaled scores, float32 `[B, H, R, M]`, `NEGATIVE` at masked keys.

    Args:
      query: `[B, R, H, A]`.
      key: `[B, Hkv, M, A]`; H is a multiple of Hkv.
      key_mask: `[B, M]`, or `[B, R, M]` where rows differ; bool, or int32 that is not zero at keys to be seen.
    """
    batch, rows, heads, size = query.shape
    grouped = query.reshape(batch, rows, key.shape[1], -1, size)
    scores = jnp.einsum("brkga,bkma->bkgrm", grouped, key, preferred_element_type=jnp.float32) * size**-0.5
    mask = key_mask[:, None, None, None, :] if key_mask.ndim == 2 else key_mask[:, None, None, :, :]
    return jnp.where(mask, scores, NEGATIVE).reshape(batch, heads, rows, -1)


def weigh_values(probability: jax.Array, value: jax.Array) -> jax.Array:
    """Attended values `[B, R, H, A]` from `probability` `[B, H, R, M]` and `value` `[B, Hkv, M, A]`."""
    batch, heads, rows, keys = probability.shape
    grouped = probability.astype(value.dtype).reshape(batch, value.shape[1], -1, rows, keys)
    out = jnp.einsum("bkgrm,bkma->brkga", grouped, value, preferred_element_type=jnp.float32)
    return out.reshape(batch, rows, heads, -1).astype(value.dtype)


def head_mean(probability: jax.Array) -> jax.Array:
    """Attention float32 `[B, R, M]`, mean over heads, of `probability` `[B, H, R, M]`: what `look` usually asks for."""
    return probability.mean(axis=1)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_mask: jax.Array,
    look: Look | None = None,
    kernels: Implementation | None = "xla",
):
    """Softmax attention in float32; arguments as in `attention_scores`.

    More than `CHUNK` rows are done in turns: all scores of a long canvas at once would be a decode's largest array.

    Args:
      look: what to keep of the attention `[B, H, R, M]`, an array `[B, R, ...]`; None for nothing.
      kernels: what may do it if nothing is kept, see `pallas_kernels.implementation.choose`.

    Returns:
      attended values `[B, R, H, A]`, and what `look` made, or None.
    """
    if look is None and key_mask.ndim == 2:
        name = drift_attention.pick(query, key, value, kernels)
        if name != "xla":
            return drift_attention.attention(query, key, value, key_mask, implementation=name), None
    rows = query.shape[1]
    if rows <= CHUNK or key_mask.ndim == 3:
        probability = jax.nn.softmax(attention_scores(query, key, key_mask), axis=-1)
        return weigh_values(probability, value), None if look is None else look(probability)
    chunks = -(-rows // CHUNK)
    padded = jnp.pad(query, ((0, 0), (0, chunks * CHUNK - rows), (0, 0), (0, 0)))
    split = padded.reshape(query.shape[0], chunks, CHUNK, *query.shape[2:]).swapaxes(0, 1)
    done = jax.lax.map(lambda chunk: attend(chunk, key, value, key_mask, look), split)
    join = lambda parts: parts.swapaxes(0, 1).reshape(parts.shape[1], chunks * CHUNK, *parts.shape[3:])[:, :rows]
    return jax.tree.map(join, done)
