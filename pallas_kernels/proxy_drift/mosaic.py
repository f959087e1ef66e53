"""Proxy drift in Pallas Mosaic GPU, for compute capability 9.x: `drift_attention` without values, keys turned back."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.drift_reference import NEGATIVE, DriftReference, group_queries, put_together, split_keys
from pallas_kernels.tiles import PER_COLUMN, ROWS, full, load, multiply, spread_columns, spread_rows

KEYS = 64
STAGES = 2
PROGRAMS = 132  # to aim for: one for each multiprocessor of an H100 or H200, whose shared memory holds one


@jax.jit  # the layers of a decode then share one lowering, which takes seconds
def proxy_drift(
    query: jax.Array, key: jax.Array, cosine: jax.Array, sine: jax.Array, key_mask: jax.Array, old: DriftReference
) -> tuple[jax.Array, DriftReference]:
    """See `pallas_kernels.proxy_drift`."""
    batch, clusters, heads, size = query.shape
    kv_heads, keys = key.shape[1:3]
    flat, planes, half = heads // kv_heads * clusters, batch * kv_heads, size // 2
    tiles = pl.cdiv(flat, ROWS)
    parts, steps = split_keys(pl.cdiv(keys, KEYS), PROGRAMS // (planes * tiles))
    mask = jnp.pad(key_mask.astype(jnp.int32), ((0, 0), (0, parts * steps * KEYS - keys)))
    grouped = group_queries(query, kv_heads)
    grouped = jnp.pad(grouped, ((0, 0), (0, tiles * ROWS - flat), (0, 0)))
    room = old.scores.shape[-1]

    def body(query_ref, key_ref, cosine_ref, sine_ref, mask_ref, scores_ref, *rest):
        stat_refs, scratch = rest[:3], rest[3]
        query_smem, key_smem, cosine_smem, sine_smem, plain_smem, old_smem, score_smem, stat_smem, ready, loaded = (
            scratch
        )
        part, tile, plane = lax.axis_index("part"), lax.axis_index("tile"), lax.axis_index("plane")
        sequence, at_rows = lax.div(plane, kv_heads), pl.ds(tile * ROWS, ROWS)
        halves = [pl.ds(0, half), pl.ds(half, half)]

        def fetch(step, slot):
            at_keys = pl.ds((part * steps + step) * KEYS, KEYS)
            for index, here in enumerate(halves):
                plgpu.copy_gmem_to_smem(key_ref.at[plane, at_keys, here], key_smem.at[slot, index], loaded.at[slot])
            plgpu.copy_gmem_to_smem(cosine_ref.at[sequence, at_keys], cosine_smem.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(sine_ref.at[sequence, at_keys], sine_smem.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(scores_ref.at[plane, at_rows, :, at_keys], old_smem.at[slot], loaded.at[slot])

        for index, here in enumerate(halves):
            plgpu.copy_gmem_to_smem(query_ref.at[plane, at_rows, here], query_smem.at[index], ready)
        for slot in range(min(STAGES, steps)):
            fetch(slot, slot)
        plgpu.barrier_wait(ready)

        def look(step, carry):
            largest, total, moved = carry
            slot = lax.rem(step, STAGES)
            at_keys = pl.ds((part * steps + step) * KEYS, KEYS)
            valid = load(mask_ref.at[sequence, at_keys], PER_COLUMN)
            plgpu.barrier_wait(loaded.at[slot])
            low, high = (load(key_smem.at[slot, index]).astype(jnp.float32) for index in range(2))
            cosines, sines = load(cosine_smem.at[slot]), load(sine_smem.at[slot])
            plain_smem[0] = (low * cosines + high * sines).astype(jnp.bfloat16)
            plain_smem[1] = (high * cosines - low * sines).astype(jnp.bfloat16)
            plgpu.commit_smem()
            pairs = ((query_smem.at[index], plain_smem.at[index].transpose((1, 0))) for index in range(2))
            scores = multiply(KEYS, *pairs) * size**-0.5
            scores = jnp.where(spread_columns(valid) > 0, scores, NEGATIVE)
            change = scores - load(old_smem.at[slot, :, 0])
            new = jnp.maximum(largest, jnp.max(scores, axis=1))
            shrink, weights = jnp.exp(largest - new), jnp.exp(scores - spread_rows(new, KEYS))
            total = total * shrink + jnp.sum(weights, axis=1)
            moved = moved * shrink + jnp.sum(weights * change, axis=1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            score_smem[:, 0] = scores
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(score_smem, scores_ref.at[plane, at_rows, :, at_keys])
            pl.when(step + STAGES < steps)(lambda: fetch(step + STAGES, slot))
            return new, total, moved

        start = full((ROWS,), NEGATIVE), full((ROWS,), 0.0), full((ROWS,), 0.0)
        for index, stat in enumerate(lax.fori_loop(0, steps, look, start)):
            stat_smem[index, :] = stat
        plgpu.commit_smem()
        for index, stat_ref in enumerate(stat_refs):
            plgpu.copy_smem_to_gmem(stat_smem.at[index], stat_ref.at[part, plane, at_rows])
        plgpu.wait_smem_to_gmem(0)

    # In place: every score is read and written by the same block.
    scores = jax.new_ref(old.scores.reshape(planes, flat, 1, room))
    stats = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((parts, planes, tiles * ROWS), jnp.float32),) * 3,
        scratch_types=[
            [
                plgpu.SMEM((2, ROWS, half), jnp.bfloat16),
                plgpu.SMEM((STAGES, 2, KEYS, half), jnp.bfloat16),
                plgpu.SMEM((STAGES, KEYS, half), jnp.float32),
                plgpu.SMEM((STAGES, KEYS, half), jnp.float32),
                plgpu.SMEM((2, KEYS, half), jnp.bfloat16),
                plgpu.SMEM((STAGES, ROWS, 1, KEYS), jnp.float32),  # the axis of 1 keeps it from being tiled
                plgpu.SMEM((ROWS, 1, KEYS), jnp.float32),
                plgpu.SMEM((3, ROWS), jnp.float32),
                plgpu.Barrier(num_arrivals=2),
                plgpu.Barrier(num_arrivals=5, num_barriers=STAGES),
            ]
        ],
        grid=(parts, tiles, planes),
        grid_names=("part", "tile", "plane"),
    )(grouped, key.reshape(planes, keys, size), cosine, sine, mask, scores)
    _, drift, reference = put_together(jax.freeze(scores), stats, old)
    return drift, reference
