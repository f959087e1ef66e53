"""What a commit rule sees of the attention: who looks at whom, averaged over heads and over the last layers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from polestar_jax.attention import CHUNK, attention_scores, head_mean
from polestar_jax.rows import take_rows
from polestar_jax.types import Pass, Scope, Signal, Spec

ATTENTION: frozenset[Signal] = frozenset({"attention", "attention_received"})
"""Signals of a policy that calls `with_attention`.

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


def with_attention(
    spec: Spec,
    layers: int,
    done: Pass,
    queries: Sequence[jax.Array],
    keys: Sequence[jax.Array],
    rows: tuple[jax.Array, jax.Array] | None,
    scope: Scope,
) -> Pass:
    """`done` with the signals of `ATTENTION`, if the rule asks for them.

    The scores are computed again, for the layers in question only: no layer's [N, N] attention is ever held.

    Args:
      layers: how many last layers are averaged.
      done: what the forward predicts.
      queries, keys: of every layer, `[B, R, H, A]` and `[B, Hkv, M, A]`.
      rows: int32 `[B, R]`, slots of the queries, which follow one another; bool `[B, R]`, those that count. None for
        the whole canvas.
    """
    if not spec.needs & ATTENTION:
        return done
    first, valid = (jnp.zeros_like(done.slot[:, :1]), scope.visible) if rows is None else (rows[0][:, :1], rows[1])
    index = done.slot + spec.model.shift - first
    there = (index >= 0) & (index < valid.shape[1]) & take_rows(valid, index)
    chosen = range(len(queries))[-layers:]
    each = total = jnp.float32(0)
    for layer in chosen:
        each += mean_attention(take_rows(queries[layer], index), keys[layer], scope.visible) / len(chosen)
        total += attention_received(queries[layer], keys[layer], scope.visible, valid) / len(chosen)
    count = jnp.maximum(valid.sum(axis=1, keepdims=True), 1)
    signals = {"attention": jnp.where(there[..., None], each, 0.0)}
    return done._replace(extra=done.extra | signals, planes={"attention_received": total / count})
