"""What Mosaic kernels share: tiles in registers as the tensor cores leave them, 64 rows at a time."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
TILE = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def load(ref, layout: Any = TILE) -> jax.Array:
    """A tile `[64, C]`, a number per row `[64]`, or one per column `[C]`."""
    return plgpu.load(ref, layout=layout, optimized=False)


def full(shape: tuple[int, ...], number: float, dtype=jnp.float32) -> jax.Array:
    """A tile `[64, C]` or a number per row `[64]`."""
    return plgpu.layout_cast(jnp.full(shape, number, dtype), TILE if len(shape) == 2 else PER_ROW)


def positions(shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """int32 row and column of every place of a tile."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE) for axis in (0, 1))
    return row, column


def spread_rows(per_row: jax.Array, width: int) -> jax.Array:
    """`[64]` over a tile."""
    return lax.broadcast_in_dim(per_row, (ROWS, width), (0,))


def spread_columns(per_column: jax.Array) -> jax.Array:
    """`[C]` over a tile."""
    return lax.broadcast_in_dim(per_column, (ROWS, per_column.shape[0]), (1,))


def multiply(width: int, *pairs) -> jax.Array:
    """float32 `[64, width]`, the sum of the products of pairs of tiles in shared memory."""

    def run(accumulator):
        for a, b in pairs:
            plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32))
