"""Elastic-Cache's layers (arXiv 2510.14973), over a few rows or over the whole canvas, and its test of drift."""

import jax
import jax.numpy as jnp

from polestar_jax.attention import attend, attention_scores, project_rows, weigh_values, write_cache
from polestar_jax.rows import put_rows, take_rows
from polestar_jax.types import Canvas, RowSet, Spec


def similarity(now: jax.Array, before: jax.Array, key_mask: jax.Array, along: str) -> jax.Array:
    """Mean cosine of two attentions `[B, H, T, N]` of the same T tokens, float32 `[B]`.

    Args:
      key_mask: bool `[B, N]`.
      along: "keys", one cosine per head and token, or "heads", one per token and key.
    """
    axis = {"keys": 3, "heads": 1}[along]
    norm = jnp.linalg.norm(now, axis=axis) * jnp.linalg.norm(before, axis=axis)
    cosine = jnp.sum(now * before, axis=axis) / jnp.maximum(norm, 1e-30)
    if along == "keys":
        return cosine.mean(axis=(1, 2))
    counted = jnp.broadcast_to(key_mask[:, None, :], cosine.shape)
    return jnp.mean(cosine, axis=(1, 2), where=counted)


def most_attended(attention: jax.Array, looking: jax.Array, decoded: jax.Array, count: int) -> jax.Array:
    """int32 `[B, count]`: the decoded slots that get most of the attention of the rows that are looking.

    Where fewer are decoded, the first of them stands in for the others.

    Args:
      attention: float32 `[B, R, N]`, mean over heads.
      looking: bool `[B, R]`.
      decoded: bool `[B, N]`, slots with a token.
    """
    total = jnp.einsum("br,brn->bn", looking.astype(jnp.float32), attention, precision="highest")
    total, slot = jax.lax.top_k(jnp.where(decoded, total, -1.0), count)
    return jnp.where(total < 0, slot[:, :1], slot).astype(jnp.int32)


def layer_rows(spec: Spec, params, layer: int, inputs, rows: RowSet, tracked: jax.Array, write: jax.Array, *state):
    """One layer over `rows` alone: what `layer_canvas` does, without the other rows.

    Args:
      inputs: float `[B, N, D]`, the layer's inputs as they are now; right at least at the slots of `rows`.
      rows: their slots.
      tracked: `[B, T]`, slots whose attention is compared.
      write: bool `[B, N]`, slots whose keys and values may change.
      state: inputs before `[B, N, D]`, keys and values before, the canvas, key mask.

    Returns:
      outputs `[B, N, D]`, right at the slots of `rows`; keys; values; the attention `[B, H, R, N]` of `rows`; that of
      the tracked tokens before anything changed, `[B, H, T, N]`.
    """
    before, keys, values, canvas, key_mask = state
    hidden = take_rows(inputs, rows.slot)
    places = (tracked, canvas, key_mask)
    query, key, value, reference = _project(spec, params, layer, hidden, rows.position, before, keys, *places)
    written = take_rows(write, rows.slot) & rows.valid
    keys, values = write_cache(keys, rows, key, written), write_cache(values, rows, value, written)
    attention = jax.nn.softmax(attention_scores(query, keys, key_mask), axis=-1)
    output = spec.model.finish(params, layer, hidden, weigh_values(attention, values))
    return put_rows(inputs, rows.slot, output, rows.valid), keys, values, attention, reference


def layer_canvas(spec: Spec, params, layer: int, inputs, rows: RowSet, tracked: jax.Array, write: jax.Array, *state):
    """One layer over the whole canvas; see `layer_rows`."""
    before, keys, values, canvas, key_mask = state
    places = (tracked, canvas, key_mask)
    query, key, value, reference = _project(spec, params, layer, inputs, canvas.position, before, keys, *places)
    fresh = write[:, None, :, None]
    keys = jnp.where(fresh, key.astype(keys.dtype), keys)
    values = jnp.where(fresh, value.astype(values.dtype), values)
    attention = jax.nn.softmax(attention_scores(take_rows(query, rows.slot), keys, key_mask), axis=-1)
    attended, _ = attend(query, keys, values, key_mask)
    return spec.model.finish(params, layer, inputs, attended), keys, values, attention, reference


def _project(spec: Spec, params, layer, hidden, position, before, keys, tracked, canvas: Canvas, key_mask):
    """`project_rows`, and the attention that the tracked tokens had before this forward: their queries are made anew
    from the layer inputs kept of them, in the same product."""
    rows = hidden.shape[1]
    together = jnp.concatenate([hidden, take_rows(before, tracked)], axis=1)
    places = jnp.concatenate([position, take_rows(canvas.position, tracked)], axis=1)
    query, key, value = project_rows(spec.model, params, layer, together, places)
    reference = jax.nn.softmax(attention_scores(query[:, rows:], keys, key_mask), axis=-1)
    return query[:, :rows], key[:, :, :rows], value[:, :, :rows], reference
