"""The window's hidden states as NVFP4 codes of their residuals to centroids (paper sections 4.1 and C.3)."""

import jax

from pallas_kernels.implementation import Implementation, choose
from pallas_kernels.residual_nvfp4 import reference

__all__ = ["gather", "quantize"]

Kept = tuple[jax.Array, jax.Array, jax.Array]


def quantize(
    rows: jax.Array,
    labels: jax.Array,
    centroids: jax.Array,
    kept: Kept | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Codes rows, each less the centroid of its cluster, to NVFP4: every implementation yields the same bits.

    Groups of 16 values share an E4M3 scale, amax / 6 rounded to nearest even and at most 448; values are divided by the
    rounded scale and rounded to nearest even, saturating, to E2M1; a group whose scale is zero has zero codes.

    Args:
      rows: float32 or bfloat16 `[B, W, D]`, D a multiple of 16.
      labels: int32 `[B, W]`, the cluster of each row; -1 (outside the window) counts as 0.
      centroids: float32 `[B, K, D]`.
      kept: codes and scales of an earlier call, which rows keep that did not change, and bool `[B, W]`, those that did;
        None codes every row. Mosaic's kernel writes into them.
      implementation: see `pallas_kernels.implementation.choose`; "mosaic" needs D to be a multiple of 256.

    Returns:
      uint8 `[B, W, D / 2]`, two codes per byte, the first in the low bits; uint8 `[B, W, D / 16]`, E4M3 scales.

    Raises:
      ValueError: if D is not a multiple of 16 or the implementation cannot run here.
    """
    match _choose("residual_nvfp4.quantize", implementation, rows, centroids):
        case "mosaic":
            from pallas_kernels.residual_nvfp4 import mosaic

            return mosaic.quantize(rows, labels, centroids, kept)
        case "triton":
            from pallas_kernels.residual_nvfp4 import triton

            return triton.quantize(rows, labels, centroids, kept)
    return reference.quantize(rows, labels, centroids, kept)


def gather(
    codes: jax.Array,
    scales: jax.Array,
    labels: jax.Array,
    centroids: jax.Array,
    index: jax.Array,
    packet: jax.Array,
    changed: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Chosen rows of a window: decoded, or taken from an update packet where that has newer ones.

    Args:
      codes, scales: of `quantize`.
      labels, centroids: as they were given to it.
      index: int32 `[B, R]`, rows of the window; clipped to it.
      packet: float32 or bfloat16 `[B, W, D]`, newer rows.
      changed: bool `[B, W]`, where the packet has one.
      implementation: as for `quantize`.

    Returns:
      `[B, R, D]` of the packet's dtype: float32 sums of residual and centroid, rounded once.

    Raises:
      ValueError: as `quantize`.
    """
    arguments = codes, scales, labels, centroids, index, packet, changed
    match _choose("residual_nvfp4.gather", implementation, packet, centroids):
        case "mosaic":
            from pallas_kernels.residual_nvfp4 import mosaic

            return mosaic.gather(*arguments)
        case "triton":
            from pallas_kernels.residual_nvfp4 import triton

            return triton.gather(*arguments)
    return reference.gather(*arguments)


def _choose(op: str, implementation: Implementation | None, rows: jax.Array, centroids: jax.Array) -> Implementation:
    size = rows.shape[-1]
    if size % reference.GROUP:
        raise ValueError(f"D = {size} is not a multiple of {reference.GROUP}: pad the rows")
    dtype = None if rows.dtype.name in ("float32", "bfloat16") else f"rows are {rows.dtype}, not float32 or bfloat16"
    tile = None if size % 256 == 0 else f"D = {size} is not a multiple of 256"
    return choose(op, implementation, mosaic=dtype or tile, triton=dtype)
