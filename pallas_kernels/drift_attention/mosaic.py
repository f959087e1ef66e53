"""Attention, measuring drift or not, in Pallas Mosaic GPU, for compute capability 9.x.

A block has up to 64 rows (the query heads of one key-value head, times the rows, flattened) and one part of the keys,
of which it takes 64 at a time, the next ones underway. Parts are merged afterwards: 32 heads alone would leave three
quarters of the machine idle. What lies beyond the last row or key is read as zeros and not written, by the copy engine.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.drift_reference import (
    NEGATIVE,
    DriftReference,
    group_queries,
    join_values,
    part_weights,
    put_together,
    split_keys,
)
from pallas_kernels.tiles import PER_COLUMN, ROWS, full, load, multiply, spread_columns, spread_rows

KEYS = PIECE = 64
STAGES = 2
PROGRAMS = 132  # to aim for: one for each multiprocessor of an H100 or H200


@jax.jit  # the layers of a decode then share one lowering, which takes seconds
def drift_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, key_mask: jax.Array, old: DriftReference
) -> tuple[jax.Array, jax.Array, DriftReference]:
    """See `pallas_kernels.drift_attention`."""
    sums, (scores,), stats = _look(query, key, value, key_mask, old)
    weights, drift, reference = put_together(scores, stats, old)
    return join_values(weights, sums, query, value), drift, reference


@jax.jit
def attention(query: jax.Array, key: jax.Array, value: jax.Array, key_mask: jax.Array) -> jax.Array:
    """See `pallas_kernels.drift_attention.attention`."""
    sums, _, stats = _look(query, key, value, key_mask, None)
    return join_values(part_weights(*stats)[0], sums, query, value)


def _look(query: jax.Array, key: jax.Array, value: jax.Array, key_mask: jax.Array, old: DriftReference | None):
    """What every part of the keys says: sums of values `[P, planes, rows', A]`; the scores, in a list that is empty if
    there are no `old` ones to compare them with; the statistics that `put_together` and `part_weights` take."""
    batch, rows, heads, size = query.shape
    kv_heads, keys = key.shape[1:3]
    flat, planes = heads // kv_heads * rows, batch * kv_heads
    tiles = pl.cdiv(flat, ROWS)
    parts, steps = split_keys(pl.cdiv(keys, KEYS), PROGRAMS // (planes * tiles))
    mask = jnp.pad(key_mask.astype(jnp.int32), ((0, 0), (0, parts * steps * KEYS - keys)))
    grouped = group_queries(query, kv_heads)
    grouped = jnp.pad(grouped, ((0, 0), (0, tiles * ROWS - flat), (0, 0)))
    pieces = size // PIECE

    def body(query_ref, key_ref, value_ref, mask_ref, *others):
        *others, shared, compared = others
        query_smem, key_smem, value_smem, weight_smem, out_smem, stat_smem, ready, loaded = shared
        compare = None
        if old is not None:
            old_ref, out_ref, scores_ref, *stat_refs = others
            compare = (old_ref, scores_ref, *compared)
        else:
            out_ref, *stat_refs = others
        part, tile, plane = lax.axis_index("part"), lax.axis_index("tile"), lax.axis_index("plane")
        at_rows = pl.ds(tile * ROWS, ROWS)

        def fetch(step, slot):
            at_keys = pl.ds((part * steps + step) * KEYS, KEYS)
            plgpu.copy_gmem_to_smem(key_ref.at[plane, at_keys], key_smem.at[slot], loaded.at[slot])
            for index in range(pieces):
                here = value_ref.at[plane, at_keys, pl.ds(index * PIECE, PIECE)]
                plgpu.copy_gmem_to_smem(here, value_smem.at[slot, index], loaded.at[slot])
            if compare is not None:
                old_ref, _, old_smem, _ = compare
                plgpu.copy_gmem_to_smem(old_ref.at[plane, at_rows, :, at_keys], old_smem.at[slot], loaded.at[slot])

        plgpu.copy_gmem_to_smem(query_ref.at[plane, at_rows], query_smem, ready)
        for slot in range(min(STAGES, steps)):
            fetch(slot, slot)
        plgpu.barrier_wait(ready)

        def attend(step, carry):
            sums, largest, total, *moved = carry
            slot = lax.rem(step, STAGES)
            at_keys = pl.ds((part * steps + step) * KEYS, KEYS)
            valid = load(mask_ref.at[lax.div(plane, kv_heads), at_keys], PER_COLUMN)
            plgpu.barrier_wait(loaded.at[slot])
            scores = multiply(KEYS, (query_smem, key_smem.at[slot].transpose((1, 0)))) * size**-0.5
            scores = jnp.where(spread_columns(valid) > 0, scores, NEGATIVE)
            new = jnp.maximum(largest, jnp.max(scores, axis=1))
            shrink, weights = jnp.exp(largest - new), jnp.exp(scores - spread_rows(new, KEYS))
            total = total * shrink + jnp.sum(weights, axis=1)
            if compare is not None:
                _, _, old_smem, score_smem = compare
                change = scores - load(old_smem.at[slot, :, 0])
                moved = [moved[0] * shrink + jnp.sum(weights * change, axis=1)]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                score_smem[:, 0] = scores
            weight_smem[...] = weights.astype(jnp.bfloat16)
            plgpu.commit_smem()
            if compare is not None:
                _, scores_ref, _, score_smem = compare
                plgpu.copy_smem_to_gmem(score_smem, scores_ref.at[plane, at_rows, :, at_keys])
            # In pieces, or old and new sums together would take all registers.
            sums = [
                piece * spread_rows(shrink, PIECE) + multiply(PIECE, (weight_smem, value_smem.at[slot, index]))
                for index, piece in enumerate(sums)
            ]
            pl.when(step + STAGES < steps)(lambda: fetch(step + STAGES, slot))
            return sums, new, total, *moved

        zeros = [full((ROWS, PIECE), 0.0) for _ in range(pieces)]
        nothing = [full((ROWS,), 0.0)] * (len(stat_refs) - 1)
        sums, *stats = lax.fori_loop(0, steps, attend, (zeros, full((ROWS,), NEGATIVE), *nothing))
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
    out_type = [jax.ShapeDtypeStruct((parts, planes, tiles * ROWS, size), jnp.float32), stat, stat]
    shared = [
        plgpu.SMEM((ROWS, size), jnp.bfloat16),
        plgpu.SMEM((STAGES, KEYS, size), jnp.bfloat16),
        plgpu.SMEM((STAGES, pieces, KEYS, PIECE), jnp.bfloat16),
        plgpu.SMEM((ROWS, KEYS), jnp.bfloat16),
        plgpu.SMEM((pieces, ROWS, PIECE), jnp.float32),
        plgpu.SMEM((2 if old is None else 3, ROWS), jnp.float32),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=1 + pieces + (old is not None), num_barriers=STAGES),
    ]
    arguments, compared = [grouped, key.reshape(planes, keys, size), value.reshape(planes, keys, size), mask], []
    if old is not None:
        room = old.scores.shape[-1]
        out_type[1:1] = [jax.ShapeDtypeStruct((planes, flat, 1, room), jnp.float32)]
        out_type.append(stat)
        # The axis of 1 keeps scores from being tiled.
        compared = [plgpu.SMEM((STAGES, ROWS, 1, KEYS), jnp.float32), plgpu.SMEM((ROWS, 1, KEYS), jnp.float32)]
        arguments.append(old.scores.reshape(planes, flat, 1, room))
    sums, *rest = plgpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=[shared, compared],
        grid=(parts, tiles, planes),
        grid_names=("part", "tile", "plane"),
    )(*arguments)
    return (sums, [], rest) if old is None else (sums, rest[:1], rest[1:])
