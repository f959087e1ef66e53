"""Attention that measures how far each row's distribution moved since an earlier look (paper section 4.2, eq. 4)."""

import importlib
from typing import Any

import jax

from pallas_kernels.drift_attention import reference
from pallas_kernels.drift_reference import DriftReference, room
from pallas_kernels.implementation import Implementation, choose

__all__ = ["DriftReference", "attention", "drift_attention", "pick"]


def drift_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_mask: jax.Array,
    old: DriftReference,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, DriftReference]:
    """Softmax attention of some rows over the cache, and KL(now || old) of their distributions, in one pass.

    The reference is kept as float32 scores and their log sum. The drift is then within 1e-6 of float64's; with scores
    kept in bfloat16 it was off by up to 2 % of itself and 4e-4 where nothing moved (docs/kernels.md).

    Args:
      query: rotated, `[B, R, H, A]`.
      key, value: `[B, Hkv, M, A]`, H a multiple of Hkv, in the query's dtype.
      key_mask: bool or int32 `[B, M]`, not zero at keys that may be attended to.
      old: of an earlier look; `DriftReference.empty` for the first.
      implementation: see `pallas_kernels.implementation.choose`; "mosaic" needs bfloat16, A = 64 or 128 and M a
        multiple of 8, "triton" float32 or bfloat16 and A a power of two from 16 to 128.

    Returns:
      attended values `[B, R, H, A]` in the dtype of `value`; the drift, float32 `[B, R]`, clamped at 0 per head and
      averaged over heads; the new reference, whose `log_sum` is the log-sum-exp of each row's scores.

    Raises:
      ValueError: if shapes do not fit or the implementation cannot run here.
    """
    check_shapes(query, key, key_mask, old)
    kernels = _kernels(pick(query, key, value, implementation))
    return kernels.drift_attention(query, key, value, key_mask, old)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_mask: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The attended values of `drift_attention` alone, `[B, R, H, A]`: no score goes to memory. Arguments as there."""
    check_shapes(query, key, key_mask)
    return _kernels(pick(query, key, value, implementation)).attention(query, key, value, key_mask)


def pick(query: jax.Array, key: jax.Array, value: jax.Array, implementation: Implementation | None) -> Implementation:
    """The implementation that `attention` and `drift_attention` would run; raises as they do."""
    dtypes = {query.dtype.name, key.dtype.name, value.dtype.name}
    mosaic, triton = mosaic_problem(key, dtypes), triton_problem(query.shape[-1], dtypes)
    return choose("drift_attention", implementation, mosaic=mosaic, triton=triton)


def _kernels(name: Implementation) -> Any:
    # A GPU's kernels are imported where they run: Triton need not be installed elsewhere.
    return reference if name == "xla" else importlib.import_module(f"pallas_kernels.drift_attention.{name}")


def mosaic_problem(key: jax.Array, dtypes: set[str]) -> str | None:
    """Why Mosaic does not take these arguments, or None."""
    keys, size = key.shape[2:]
    if keys % 8:
        return f"M = {keys} keys are not a multiple of 8"
    if dtypes != {"bfloat16"}:
        return f"tensor cores multiply bfloat16, not {', '.join(sorted(dtypes))}"
    return None if size in (64, 128) else f"heads of {size} are not of 64 or 128"


def triton_problem(size: int, dtypes: set[str]) -> str | None:
    """Why Triton does not take these arguments, or None."""
    if dtypes not in ({"bfloat16"}, {"float32"}):
        return f"query, key and value are {', '.join(sorted(dtypes))}, not all float32 or all bfloat16"
    return None if size in (16, 32, 64, 128) else f"heads of {size} are not of 16, 32, 64 or 128"


def check_shapes(query: jax.Array, key: jax.Array, key_mask: jax.Array, old: DriftReference | None = None) -> None:
    """Raises ValueError unless everything has the sizes of `query` and `key`."""
    batch, rows, heads, size = query.shape
    _, kv_heads, keys, _ = key.shape
    if key.shape != (batch, kv_heads, keys, size) or heads % kv_heads:
        raise ValueError(f"keys {key.shape} do not fit queries {query.shape}: expected [B, Hkv, M, A], Hkv dividing H")
    if key_mask.shape != (batch, keys):
        raise ValueError(f"key_mask {key_mask.shape} must be {(batch, keys)}")
    expected = (batch, heads, rows, room(keys))
    if old is not None and (old.scores.shape != expected or old.log_sum.shape != expected[:-1]):
        raise ValueError(f"old scores {old.scores.shape} must be {expected}: make them with DriftReference.empty")
