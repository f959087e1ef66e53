"""The ops and the shapes of their arguments, for benchmarks and for compiling without arrays."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import residual_nvfp4
from pallas_kernels.confident_argmax import confident_argmax
from pallas_kernels.drift_attention import DriftReference, attention, drift_attention
from pallas_kernels.proxy_drift import proxy_drift
from pallas_kernels.shapes import Shape

Struct = jax.ShapeDtypeStruct


def _cache(shape: Shape) -> Struct:
    return Struct((shape.batch, shape.kv_heads, shape.keys, shape.head_size), jnp.dtype(shape.dtype))


def _reference(shape: Shape, rows: int) -> DriftReference:
    return jax.eval_shape(lambda: DriftReference.empty(shape.batch, shape.heads, rows, shape.keys))


def _drift_attention(shape: Shape) -> tuple[Any, ...]:
    query = Struct((shape.batch, shape.rows, shape.heads, shape.head_size), jnp.dtype(shape.dtype))
    mask = Struct((shape.batch, shape.keys), jnp.bool_)
    return query, _cache(shape), _cache(shape), mask, _reference(shape, shape.rows)


def _proxy_drift(shape: Shape) -> tuple[Any, ...]:
    query = Struct((shape.batch, shape.clusters, shape.heads, shape.head_size), jnp.dtype(shape.dtype))
    turn = Struct((shape.batch, shape.keys, shape.head_size // 2), jnp.float32)
    mask = Struct((shape.batch, shape.keys), jnp.bool_)
    return query, _cache(shape), turn, turn, mask, _reference(shape, shape.clusters)


def _quantize(shape: Shape) -> tuple[Any, ...]:
    rows = Struct((shape.batch, shape.window, shape.model_size), jnp.dtype(shape.dtype))
    labels = Struct((shape.batch, shape.window), jnp.int32)
    return rows, labels, Struct((shape.batch, shape.clusters, shape.model_size), jnp.float32)


def _recode(shape: Shape) -> tuple[Any, ...]:
    codes, scales, labels, centroids, _, rows, changed = _gather(shape)
    return rows, labels, centroids, (codes, scales, changed)


def _gather(shape: Shape) -> tuple[Any, ...]:
    rows, labels, centroids = _quantize(shape)
    codes, scales = jax.eval_shape(residual_nvfp4.reference.quantize, rows, labels, centroids)
    index = Struct((shape.batch, shape.selected), jnp.int32)
    return codes, scales, labels, centroids, index, rows, Struct(labels.shape, jnp.bool_)


def _confident_argmax(shape: Shape) -> tuple[Any, ...]:
    dtype = jnp.dtype(shape.dtype)
    rows = Struct((shape.batch * shape.rows, shape.model_size), dtype)
    return rows, Struct((shape.model_size,), dtype), Struct((shape.vocabulary, shape.model_size), dtype)


OPS: dict[str, tuple[Callable[..., Any], Callable[[Shape], tuple[Any, ...]]]] = {
    "attention": (attention, lambda shape: _drift_attention(shape)[:4]),
    "drift_attention": (drift_attention, _drift_attention),
    "proxy_drift": (proxy_drift, _proxy_drift),
    "residual_nvfp4.quantize": (residual_nvfp4.quantize, _quantize),
    "residual_nvfp4.quantize, some kept": (residual_nvfp4.quantize, _recode),
    "residual_nvfp4.gather": (residual_nvfp4.gather, _gather),
    "confident_argmax": (functools.partial(confident_argmax, epsilon=1e-5, mask_id=5), _confident_argmax),
}
"""Name -> the op, and its arguments at a shape."""
