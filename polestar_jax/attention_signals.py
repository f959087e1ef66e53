"""What a commit rule sees of the attention: who looks at whom, averaged over heads and over the last layers."""

import jax
import jax.numpy as jnp

from polestar_jax.attention import CHUNK, attention_scores, head_mean
from polestar_jax.rows import Forward, take_rows
from polestar_jax.types import Signal, Spec

ATTENTION: frozenset[Signal] = frozenset({"attention", "attention_received"})
"""Signals of a policy that calls `look_at_attention`.

"attention", float32 `[B, R, N]` in `Prediction.extra`: attention of the row *at* each predicted position (where logits
are shifted that is not the row that predicts it), zero where the forward did not compute that row.
"attention_received", float32 `[B, N]` in `Prediction.planes`: the mean over all valid rows that the forward computed.
"""


def attention_problems(layers: int) -> list[str]:
    """What is wrong with a policy's `attention_layers`."""
    return [] if layers >= 1 else [f"attention_layers={layers} must be at least 1"]


def mean_attention(query: jax.Array, key: jax.Array, key_mask: jax.Array) -> jax.Array:
    """Softmax attention float32 `[B, R, M]`, mean over heads; arguments as in `attention_scores`."""
    return head_mean(jax.nn.softmax(attention_scores(query, key, key_mask), axis=-1))


def attention_received(query: jax.Array, key: jax.Array, key_mask: jax.Array, valid: jax.Array) -> jax.Array:
    """`mean_attention` summed over the rows that are `valid` `[B, R]`, `[B, M]`; many rows are done in turns."""
    rows = query.shape[1]
    if rows <= CHUNK:
        return jnp.sum(mean_attention(query, key, key_mask), axis=1, where=valid[..., None])
    chunks = -(-rows // CHUNK)

    def split(plane: jax.Array) -> jax.Array:
        padded = jnp.pad(plane, [(0, 0), (0, chunks * CHUNK - rows)] + [(0, 0)] * (plane.ndim - 2))
        return padded.reshape(plane.shape[0], chunks, CHUNK, *plane.shape[2:]).swapaxes(0, 1)

    def add(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + attention_received(chunk[0], key, key_mask, chunk[1]), None

    total = jnp.zeros((query.shape[0], key.shape[2]), jnp.float32)
    return jax.lax.scan(add, total, (split(query), split(valid)))[0]


def look_at_attention(
    spec: Spec,
    layers: int,
    ran: Forward,
    valid: jax.Array,
    slot: jax.Array,
    key_mask: jax.Array,
    first: jax.Array | int = 0,
) -> tuple[dict[Signal, jax.Array], dict[Signal, jax.Array]]:
    """The signals of `ATTENTION`; nothing if the rule asks for none.

    The scores are computed again, for the layers in question only: no layer's [N, N] attention is ever held.

    Args:
      layers: how many last layers are averaged.
      ran: a forward over R rows that follow one another.
      valid: bool `[B, R]`, its rows that count.
      slot: int32 `[B, W]`, slots of the rows that predict.
      key_mask: bool `[B, M]`.
      first: int32 `[B]`, slot of the first row.

    Returns:
      signals by predicting row, and by slot.
    """
    if not spec.needs & ATTENTION:
        return {}, {}
    index = slot + spec.model.shift - jnp.reshape(first, (-1, 1))
    there = (index >= 0) & (index < valid.shape[1]) & take_rows(valid, index)
    chosen = range(len(ran.queries))[-layers:]
    rows = total = jnp.float32(0)
    for layer in chosen:
        query, key = ran.queries[layer], ran.keys[layer]
        rows += mean_attention(take_rows(query, index), key, key_mask) / len(chosen)
        total += attention_received(query, key, key_mask, valid) / len(chosen)
    count = jnp.maximum(valid.sum(axis=1, keepdims=True), 1)
    return {"attention": jnp.where(there[..., None], rows, 0.0)}, {"attention_received": total / count}
