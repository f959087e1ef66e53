"""Attention, measuring drift or not, in Triton, for compute capability 8.0 to 8.9; split and merged as in Mosaic."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.drift_reference import (
    NEGATIVE,
    DriftReference,
    join_values,
    part_weights,
    put_together,
    split_keys,
)
from pallas_kernels.launch import launch_triton

KEYS = 32
PROGRAMS = 216  # to aim for: two for each multiprocessor of an A100


def drift_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, key_mask: jax.Array, old: DriftReference
) -> tuple[jax.Array, jax.Array, DriftReference]:
    """See `pallas_kernels.drift_attention`."""
    sums, *stats, moved, scores = _look(query, key, value, key_mask, old)
    weights, drift, reference = put_together(scores, [*stats, moved], old)
    return join_values(weights, sums, query, value), drift, reference


def attention(query: jax.Array, key: jax.Array, value: jax.Array, key_mask: jax.Array) -> jax.Array:
    """See `pallas_kernels.drift_attention.attention`."""
    sums, largest, total, *_ = _look(query, key, value, key_mask, None)
    return join_values(part_weights(largest, total)[0], sums, query, value)


def _look(query: jax.Array, key: jax.Array, value: jax.Array, key_mask: jax.Array, old: DriftReference | None):
    """What every part of the keys says: sums of values `[P, planes, rows', A]`; maximum, sum, and change since the
    `old` scores `[P, planes, rows']`; the new scores. Without old ones the last two are nothing."""
    batch, rows, heads, size = query.shape
    kv_heads, keys = key.shape[1:3]
    flat, planes = heads // kv_heads * rows, batch * kv_heads
    block = 16 if flat <= 16 else 32
    tiles = triton.cdiv(flat, block)
    parts, steps = split_keys(triton.cdiv(keys, KEYS), PROGRAMS // (planes * tiles))
    stat = jax.ShapeDtypeStruct((parts, planes, tiles * block), jnp.float32)
    nothing = jnp.zeros((1,), jnp.float32)
    scores = nothing if old is None else old.scores
    return launch_triton(
        _attend,
        query,
        key,
        value,
        key_mask.astype(jnp.int32),
        scores,
        out_type=(
            jax.ShapeDtypeStruct((parts, planes, tiles * block, size), jnp.float32),
            stat,
            stat,
            jax.ShapeDtypeStruct(nothing.shape, jnp.float32) if old is None else stat,
            jax.ShapeDtypeStruct(scores.shape, jnp.float32),
        ),
        grid=(parts, tiles, planes),
        keys=keys,
        room=scores.shape[-1],
        count=rows,
        group=heads // kv_heads,
        kv_heads=kv_heads,
        steps=steps,
        scale=size**-0.5,
        negative=NEGATIVE,
        SIZE=size,
        ROWS=block,
        KEYS=KEYS,
        COMPARE=old is not None,
    )


@triton.jit
def _attend(
    query_ref,
    key_ref,
    value_ref,
    mask_ref,
    old_ref,
    out_ref,
    largest_ref,
    total_ref,
    moved_ref,
    scores_ref,
    keys: tl.constexpr,
    room: tl.constexpr,
    count: tl.constexpr,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    steps: tl.constexpr,
    scale: tl.constexpr,
    negative: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COMPARE: tl.constexpr,
):
    part, tile, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile * ROWS + tl.arange(0, ROWS)
    flat: tl.constexpr = count * group
    real = row[:, None] < flat
    feature = tl.arange(0, SIZE)
    head = plane % kv_heads * group + row[:, None] // count
    asked = ((plane // kv_heads * count + row[:, None] % count) * group * kv_heads + head) * SIZE
    query = tl.load(query_ref + asked + feature[None, :], mask=real, other=0.0)
    largest = tl.full((ROWS,), negative, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moved = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, SIZE), tl.float32)
    for step in range(steps):
        at = (part * steps + step) * KEYS + tl.arange(0, KEYS)
        inside = at < keys
        cached = (plane * keys + at[:, None]) * SIZE + feature[None, :]
        key = tl.load(key_ref + cached, mask=inside[:, None], other=0.0)
        value = tl.load(value_ref + cached, mask=inside[:, None], other=0.0)
        valid = tl.load(mask_ref + (plane // kv_heads) * keys + at, mask=inside, other=0) > 0
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, negative)
        new = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp(largest - new)
        weights = tl.exp(scores - new[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        if COMPARE:
            place = (plane * flat + row[:, None]) * room + at[None, :]
            held = real & (at < room)[None, :]
            old = tl.load(old_ref + place, mask=held, other=0.0)
            tl.store(scores_ref + place, scores, mask=held)
            moved = moved * shrink + tl.sum(weights * (scores - old), axis=1)
        out = out * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = new
    place = (part * tl.num_programs(2) + plane) * tl.num_programs(1) * ROWS + row
    tl.store(out_ref + place[:, None] * SIZE + feature[None, :], out)
    tl.store(largest_ref + place, largest)
    tl.store(total_ref + place, total)
    if COMPARE:
        tl.store(moved_ref + place, moved)
