"""How far the attention of centroids moved: the drift of the clusters they stand for (paper section 4.1)."""

import jax

from pallas_kernels.drift_attention import check_shapes, mosaic_problem, triton_problem
from pallas_kernels.drift_reference import DriftReference
from pallas_kernels.implementation import Implementation, choose
from pallas_kernels.proxy_drift import reference

__all__ = ["DriftReference", "pick", "proxy_drift"]


def proxy_drift(
    query: jax.Array,
    key: jax.Array,
    cosine: jax.Array,
    sine: jax.Array,
    key_mask: jax.Array,
    old: DriftReference,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, DriftReference]:
    """KL(now || old) of attention without position on either side, over the cached keys as they are.

    Cached keys are rotated; they are turned back as they are read, so that no second cache is kept or made.

    Args:
      query: of the centroids, never rotated, `[B, K, H, A]`.
      key: rotated ("rotate half"), `[B, Hkv, M, A]`, in the query's dtype.
      cosine, sine: of each key's angles, float32 `[B, M, A / 2]`.
      key_mask: bool `[B, M]`.
      old: reference of an earlier look.
      implementation: as in `drift_attention`.

    Returns:
      the drift, float32 `[B, K]`, clamped at 0 per head and averaged over heads; the new reference.

    Raises:
      ValueError: if shapes do not fit or the implementation cannot run here.
    """
    check_shapes(query, key, key_mask, old)
    expected = (*key_mask.shape, query.shape[-1] // 2)
    if cosine.shape != expected or sine.shape != expected:
        raise ValueError(f"cosine {cosine.shape} and sine {sine.shape} must be {expected}")
    arguments = query, key, cosine, sine, key_mask, old
    match pick(query, key, implementation):
        case "mosaic":
            from pallas_kernels.proxy_drift import mosaic as kernels

            return kernels.proxy_drift(*arguments)
        case "triton":
            from pallas_kernels.proxy_drift import triton as kernels

            return kernels.proxy_drift(*arguments)
    return reference.proxy_drift(*arguments)


def pick(query: jax.Array, key: jax.Array, implementation: Implementation | None) -> Implementation:
    """The implementation that `proxy_drift` would run; raises as it does."""
    size, dtypes = query.shape[-1], {query.dtype.name, key.dtype.name}
    triton = triton_problem(size, dtypes)
    if size == 16:
        triton = triton or "half a head of 16 is too little to multiply"
    return choose("proxy_drift", implementation, mosaic=mosaic_problem(key, dtypes), triton=triton)
