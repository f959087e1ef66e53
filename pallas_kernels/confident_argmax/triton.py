"""Confident arg max in Triton, for compute capability 8.0 to 8.9."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.confident_argmax.merge import merge
from pallas_kernels.confident_argmax.reference import normalize
from pallas_kernels.drift_reference import NEGATIVE, split_keys
from pallas_kernels.launch import launch_triton

WORDS = 64
COLUMNS = 64
PROGRAMS = 216  # to aim for: two for each multiprocessor of an A100


def confident_argmax(
    hidden: jax.Array, norm: jax.Array, head: jax.Array, epsilon: float, mask_id: int | None
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.confident_argmax`."""
    (rows, size), words = hidden.shape, head.shape[0]
    block = 16 if rows <= 16 else 32
    tiles = triton.cdiv(rows, block)
    parts, steps = split_keys(triton.cdiv(words, WORDS), PROGRAMS // tiles, most=PROGRAMS)
    stat = jax.ShapeDtypeStruct((parts, tiles * block), jnp.float32)
    found = launch_triton(
        _treat,
        normalize(hidden, norm, epsilon),
        head,
        out_type=(stat, stat, stat, jax.ShapeDtypeStruct(stat.shape, jnp.int32)),
        grid=(tiles, parts, 1),
        num_stages=4,
        rows=rows,
        size=size,
        words=words,
        steps=steps,
        mask_id=-1 if mask_id is None else mask_id,
        negative=NEGATIVE,
        ROWS=block,
        WORDS=WORDS,
        COLUMNS=COLUMNS,
    )
    return merge(*(each[:, :rows] for each in found))


@triton.jit
def _treat(
    hidden_ref,
    head_ref,
    largest_ref,
    total_ref,
    best_ref,
    token_ref,
    rows: tl.constexpr,
    size: tl.constexpr,
    words: tl.constexpr,
    steps: tl.constexpr,
    mask_id: tl.constexpr,
    negative: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    largest = tl.full((ROWS,), negative, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    best = tl.full((ROWS,), 2 * negative, tl.float32)
    token = tl.zeros((ROWS,), tl.int32)
    for step in range(steps):
        word = (part * steps + step) * WORDS + tl.arange(0, WORDS)
        real = word < words
        logits = tl.zeros((ROWS, WORDS), tl.float32)
        # The head has more elements than an int32 may count to.
        at_words = head_ref + word[:, None].to(tl.int64) * size + column[None, :]
        at_rows = hidden_ref + row[:, None] * size + column[None, :]
        for start in range(0, size, COLUMNS):
            hidden = tl.load(at_rows + start, mask=row[:, None] < rows, other=0.0)
            head = tl.load(at_words + start, mask=real[:, None], other=0.0)
            logits += tl.dot(hidden, tl.trans(head), input_precision="ieee")
        logits = tl.where(real[None, :], logits, negative)
        new = tl.maximum(largest, tl.max(logits, axis=1))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(logits - new[:, None]), axis=1)
        largest = new
        logits = tl.where(word[None, :] == mask_id, negative, logits)
        top = tl.max(logits, axis=1)
        first = tl.min(tl.where(logits == top[:, None], word[None, :], 1 << 30), axis=1)
        token = tl.where(top > best, first, token)
        best = tl.maximum(best, top)
    place = part * tl.num_programs(0) * ROWS + row
    tl.store(largest_ref + place, largest)
    tl.store(total_ref + place, total)
    tl.store(best_ref + place, best)
    tl.store(token_ref + place, token)
