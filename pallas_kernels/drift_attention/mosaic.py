"""Drift attention in Pallas Mosaic GPU, for compute capability 9.x.

A block has up to 64 rows (the query heads of one key-value head, times the rows, flattened) and one part of the keys,
of which it takes 64 at a time, the next ones underway. Parts are merged afterwards: 32 heads alone would leave three
quarters of the machine idle. What lies beyond the last row or key is read as zeros and not written, by the copy engine.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.drift_reference import NEGATIVE, DriftReference, group_queries, put_together, split_keys
from pallas_kernels.tiles import PER_COLUMN, ROWS, full, load, multiply, spread_columns, spread_rows

KEYS = PIECE = 64
STAGES = 2
PROGRAMS = 132  # to aim for: one for each multiprocessor of an H100 or H200


@jax.jit  # the layers of a decode then share one lowering, which takes seconds
def drift_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, key_mask: jax.Array, old: DriftReference
) -> tuple[jax.Array, jax.Array, DriftReference]:
    """See `pallas_kernels.drift_attention`."""
    batch, rows, heads, size = query.shape
    kv_heads, keys = key.shape[1:3]
    flat, planes = heads // kv_heads * rows, batch * kv_heads
    tiles = pl.cdiv(flat, ROWS)
    parts, steps = split_keys(pl.cdiv(keys, KEYS), PROGRAMS // (planes * tiles))
    mask = jnp.pad(key_mask.astype(jnp.int32), ((0, 0), (0, parts * steps * KEYS - keys)))
    grouped = group_queries(query, kv_heads)
    grouped = jnp.pad(grouped, ((0, 0), (0, tiles * ROWS - flat), (0, 0)))
    room, pieces = old.scores.shape[-1], size // PIECE

    def body(query_ref, key_ref, value_ref, mask_ref, old_ref, out_ref, scores_ref, *rest):
        stat_refs, scratch = rest[:3], rest[3]
        query_smem, key_smem, value_smem, old_smem, score_smem, weight_smem, out_smem, stat_smem, ready, loaded = (
            scratch
        )
        part, tile, plane = lax.axis_index("part"), lax.axis_index("tile"), lax.axis_index("plane")
        at_rows = pl.ds(tile * ROWS, ROWS)

        def fetch(step, slot):
            at_keys = pl.ds((part * steps + step) * KEYS, KEYS)
            plgpu.copy_gmem_to_smem(key_ref.at[plane, at_keys], key_smem.at[slot], loaded.at[slot])
            for index in range(pieces):
                here = value_ref.at[plane, at_keys, pl.ds(index * PIECE, PIECE)]
                plgpu.copy_gmem_to_smem(here, value_smem.at[slot, index], loaded.at[slot])
            plgpu.copy_gmem_to_smem(old_ref.at[plane, at_rows, :, at_keys], old_smem.at[slot], loaded.at[slot])

        plgpu.copy_gmem_to_smem(query_ref.at[plane, at_rows], query_smem, ready)
        for slot in range(min(STAGES, steps)):
            fetch(slot, slot)
        plgpu.barrier_wait(ready)

        def attend(step, carry):
            sums, largest, total, moved = carry
            slot = lax.rem(step, STAGES)
            at_keys = pl.ds((part * steps + step) * KEYS, KEYS)
            valid = load(mask_ref.at[lax.div(plane, kv_heads), at_keys], PER_COLUMN)
            plgpu.barrier_wait(loaded.at[slot])
            scores = multiply(KEYS, (query_smem, key_smem.at[slot].transpose((1, 0)))) * size**-0.5
            scores = jnp.where(spread_columns(valid) > 0, scores, NEGATIVE)
            change = scores - load(old_smem.at[slot, :, 0])
            new = jnp.maximum(largest, jnp.max(scores, axis=1))
            shrink, weights = jnp.exp(largest - new), jnp.exp(scores - spread_rows(new, KEYS))
            total = total * shrink + jnp.sum(weights, axis=1)
            moved = moved * shrink + jnp.sum(weights * change, axis=1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            weight_smem[...] = weights.astype(jnp.bfloat16)
            score_smem[:, 0] = scores
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(score_smem, scores_ref.at[plane, at_rows, :, at_keys])
            # In pieces, or old and new sums together would take all registers.
            sums = [
                piece * spread_rows(shrink, PIECE) + multiply(PIECE, (weight_smem, value_smem.at[slot, index]))
                for index, piece in enumerate(sums)
            ]
            pl.when(step + STAGES < steps)(lambda: fetch(step + STAGES, slot))
            return sums, new, total, moved

        zeros = [full((ROWS, PIECE), 0.0) for _ in range(pieces)]
        sums, *stats = lax.fori_loop(
            0, steps, attend, (zeros, full((ROWS,), NEGATIVE), full((ROWS,), 0.0), full((ROWS,), 0.0))
        )
        for index, piece in enumerate(sums):
            out_smem[index] = piece
        for index, stat in enumerate(stats):
            stat_smem[index, :] = stat
        plgpu.commit_smem()
        for index in range(pieces):
            here = out_ref.at[part, plane, at_rows, pl.ds(index * PIECE, PIECE)]
            plgpu.copy_smem_to_gmem(out_smem.at[index], here)
        for index, stat_ref in enumerate(stat_refs):
            plgpu.copy_smem_to_gmem(stat_smem.at[index], stat_ref.at[part, plane, at_rows])
        plgpu.wait_smem_to_gmem(0)

    stat = jax.ShapeDtypeStruct((parts, planes, tiles * ROWS), jnp.float32)
    out, scores, *stats = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((parts, planes, tiles * ROWS, size), jnp.float32),
            jax.ShapeDtypeStruct((planes, flat, 1, room), jnp.float32),
            *(stat,) * 3,
        ),
        scratch_types=[
            [
                plgpu.SMEM((ROWS, size), jnp.bfloat16),
                plgpu.SMEM((STAGES, KEYS, size), jnp.bfloat16),
                plgpu.SMEM((STAGES, pieces, KEYS, PIECE), jnp.bfloat16),
                plgpu.SMEM((STAGES, ROWS, 1, KEYS), jnp.float32),  # the axis of 1 keeps it from being tiled
                plgpu.SMEM((ROWS, 1, KEYS), jnp.float32),
                plgpu.SMEM((ROWS, KEYS), jnp.bfloat16),
                plgpu.SMEM((pieces, ROWS, PIECE), jnp.float32),
                plgpu.SMEM((3, ROWS), jnp.float32),
                plgpu.Barrier(),
                plgpu.Barrier(num_arrivals=2 + pieces, num_barriers=STAGES),
            ]
        ],
        grid=(parts, tiles, planes),
        grid_names=("part", "tile", "plane"),
    )(
        grouped,
        key.reshape(planes, keys, size),
        value.reshape(planes, keys, size),
        mask,
        old.scores.reshape(planes, flat, 1, room),
    )
    weights, drift, reference = put_together(scores, stats, old)
    attended = jnp.sum(weights[..., None] * out, axis=0)[:, :flat].reshape(batch, kv_heads, -1, rows, size)
    attended = attended.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(value.dtype)
    return attended, drift, reference
