"""Proxy drift in Triton, for compute capability 8.0 to 8.9: `drift_attention` without values, keys turned back."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.drift_reference import NEGATIVE, DriftReference, put_together, split_keys
from pallas_kernels.launch import launch_triton

KEYS = 32
PROGRAMS = 216  # to aim for: two for each multiprocessor of an A100


def proxy_drift(
    query: jax.Array, key: jax.Array, cosine: jax.Array, sine: jax.Array, key_mask: jax.Array, old: DriftReference
) -> tuple[jax.Array, DriftReference]:
    """See `pallas_kernels.proxy_drift`."""
    batch, clusters, heads, size = query.shape
    kv_heads, keys = key.shape[1:3]
    flat, planes = heads // kv_heads * clusters, batch * kv_heads
    block = 16 if flat <= 16 else 64
    tiles = triton.cdiv(flat, block)
    parts, steps = split_keys(triton.cdiv(keys, KEYS), PROGRAMS // (planes * tiles))
    stat = jax.ShapeDtypeStruct((parts, planes, tiles * block), jnp.float32)
    scores = jax.new_ref(old.scores)
    stats = launch_triton(
        _look,
        query,
        key,
        cosine,
        sine,
        key_mask.astype(jnp.int32),
        scores,
        out_type=(stat,) * 3,
        grid=(parts, tiles, planes),
        keys=keys,
        room=old.scores.shape[-1],
        count=clusters,
        group=heads // kv_heads,
        kv_heads=kv_heads,
        steps=steps,
        scale=size**-0.5,
        negative=NEGATIVE,
        HALF=size // 2,
        ROWS=block,
        KEYS=KEYS,
    )
    _, drift, reference = put_together(jax.freeze(scores), list(stats), old)
    return drift, reference


@triton.jit
def _look(
    query_ref,
    key_ref,
    cosine_ref,
    sine_ref,
    mask_ref,
    scores_ref,
    largest_ref,
    total_ref,
    moved_ref,
    keys: tl.constexpr,
    room: tl.constexpr,
    count: tl.constexpr,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    steps: tl.constexpr,
    scale: tl.constexpr,
    negative: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    part, tile, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = plane // kv_heads
    row = tile * ROWS + tl.arange(0, ROWS)
    flat: tl.constexpr = count * group
    real = row[:, None] < flat
    feature = tl.arange(0, HALF)[None, :]
    head = plane % kv_heads * group + row[:, None] // count
    asked = ((sequence * count + row[:, None] % count) * group * kv_heads + head) * 2 * HALF + feature
    query_low = tl.load(query_ref + asked, mask=real, other=0.0)
    query_high = tl.load(query_ref + asked + HALF, mask=real, other=0.0)
    largest = tl.full((ROWS,), negative, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moved = tl.zeros((ROWS,), tl.float32)
    for step in range(steps):
        at = (part * steps + step) * KEYS + tl.arange(0, KEYS)
        inside = (at < keys)[:, None]
        cached = (plane * keys + at[:, None]) * 2 * HALF + feature
        low = tl.load(key_ref + cached, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(key_ref + cached + HALF, mask=inside, other=0.0).to(tl.float32)
        turn = (sequence * keys + at[:, None]) * HALF + feature
        cosine = tl.load(cosine_ref + turn, mask=inside, other=0.0)
        sine = tl.load(sine_ref + turn, mask=inside, other=0.0)
        plain_low = (low * cosine + high * sine).to(query_low.dtype)
        plain_high = (high * cosine - low * sine).to(query_low.dtype)
        valid = tl.load(mask_ref + sequence * keys + at, mask=at < keys, other=0) > 0
        place = (plane * flat + row[:, None]) * room + at[None, :]
        held = real & (at < room)[None, :]
        old = tl.load(scores_ref + place, mask=held, other=0.0)
        scores = tl.dot(query_low, tl.trans(plain_low), input_precision="ieee")
        scores = (scores + tl.dot(query_high, tl.trans(plain_high), input_precision="ieee")) * scale
        scores = tl.where(valid[None, :], scores, negative)
        tl.store(scores_ref + place, scores, mask=held)  # in place: no other program, nor step, reads these
        new = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp(largest - new)
        weights = tl.exp(scores - new[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        moved = moved * shrink + tl.sum(weights * (scores - old), axis=1)
        largest = new
    place = (part * tl.num_programs(2) + plane) * tl.num_programs(1) * ROWS + row
    tl.store(largest_ref + place, largest)
    tl.store(total_ref + place, total)
    tl.store(moved_ref + place, moved)
