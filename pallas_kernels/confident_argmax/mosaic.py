"""Confident arg max in Pallas Mosaic GPU, for compute capability 9.x.

A block has 64 rows and some tiles of 128 words in a row; it reads the head 64 columns at a time, three pieces ahead,
across the ends of tiles, and keeps a running maximum, sum, winner and word per row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.confident_argmax.merge import merge
from pallas_kernels.confident_argmax.reference import normalize
from pallas_kernels.drift_reference import NEGATIVE, split_keys
from pallas_kernels.tiles import ROWS, full, positions, spread_rows

WORDS = 128
COLUMNS = 64
STAGES = 4
PROGRAMS = 132  # to aim for: one for each multiprocessor of an H100 or H200
_NO_WORD = 2**30


def confident_argmax(
    hidden: jax.Array, norm: jax.Array, head: jax.Array, epsilon: float, mask_id: int | None
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.confident_argmax`."""
    (rows, size), words = hidden.shape, head.shape[0]
    tiles, pieces = pl.cdiv(rows, ROWS), size // COLUMNS
    parts, steps = split_keys(pl.cdiv(words, WORDS), PROGRAMS // tiles, most=PROGRAMS)
    hidden = jnp.pad(normalize(hidden, norm, epsilon), ((0, tiles * ROWS - rows), (0, 0)))

    def body(hidden_ref, head_ref, *rest):
        out_refs, (hidden_smem, head_smem, stat_smem, token_smem, loaded) = rest[:4], rest[4]
        tile, part = lax.axis_index("tile"), lax.axis_index("part")
        at_rows = pl.ds(tile * ROWS, ROWS)

        def fetch(turn):
            slot = lax.rem(turn, STAGES)
            here = pl.ds(lax.rem(turn, pieces) * COLUMNS, COLUMNS)
            at_words = pl.ds((part * steps + lax.div(turn, pieces)) * WORDS, WORDS)
            plgpu.copy_gmem_to_smem(hidden_ref.at[at_rows, here], hidden_smem.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(head_ref.at[at_words, here], head_smem.at[slot], loaded.at[slot])

        for turn in range(min(STAGES, steps * pieces)):
            fetch(jnp.int32(turn))

        def treat(step, carry):
            largest, total, best, token = carry

            def multiply(accumulator):
                def add(piece, _):
                    turn = step * pieces + piece
                    slot = lax.rem(turn, STAGES)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.wgmma(accumulator, hidden_smem.at[slot], head_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    pl.when(turn + STAGES < steps * pieces)(lambda: fetch(turn + STAGES))
                    return _

                lax.fori_loop(0, pieces, add, None)
                return accumulator[...]

            logits = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, WORDS), jnp.float32))
            _, word = positions((ROWS, WORDS))
            word = word + (part * steps + step) * WORDS
            logits = jnp.where(word < words, logits, NEGATIVE)
            new = jnp.maximum(largest, jnp.max(logits, axis=1))
            total = total * jnp.exp(largest - new) + jnp.sum(jnp.exp(logits - spread_rows(new, WORDS)), axis=1)
            if mask_id is not None:
                logits = jnp.where(word == mask_id, NEGATIVE, logits)
            top = jnp.max(logits, axis=1)
            first = jnp.min(jnp.where(logits == spread_rows(top, WORDS), word, _NO_WORD), axis=1)
            better = top > best
            return new, total, jnp.where(better, top, best), jnp.where(better, first, token)

        # Below every logit, so that even a part of nothing but masked words has a word to show.
        start = full((ROWS,), NEGATIVE), full((ROWS,), 0.0), full((ROWS,), 2 * NEGATIVE), full((ROWS,), 0, jnp.int32)
        *stats, token = lax.fori_loop(0, steps, treat, start)
        for index, stat in enumerate(stats):
            stat_smem[index, :] = stat
        token_smem[...] = token
        plgpu.commit_smem()
        for smem, out_ref in zip((*(stat_smem.at[index] for index in range(3)), token_smem), out_refs, strict=True):
            plgpu.copy_smem_to_gmem(smem, out_ref.at[part, at_rows])
        plgpu.wait_smem_to_gmem(0)

    found = jax.ShapeDtypeStruct((parts, tiles * ROWS), jnp.float32)
    found = plgpu.kernel(
        body,
        out_type=(found, found, found, jax.ShapeDtypeStruct(found.shape, jnp.int32)),
        scratch_types=[
            [
                plgpu.SMEM((STAGES, ROWS, COLUMNS), jnp.bfloat16),
                plgpu.SMEM((STAGES, WORDS, COLUMNS), jnp.bfloat16),
                plgpu.SMEM((3, ROWS), jnp.float32),
                plgpu.SMEM((ROWS,), jnp.int32),
                plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            ]
        ],
        grid=(tiles, parts),
        grid_names=("tile", "part"),
    )(hidden, head)
    return merge(*(stat[:, :rows] for stat in found))
