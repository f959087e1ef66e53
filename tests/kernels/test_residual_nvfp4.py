"""Residual NVFP4: every implementation gives the bits of the reference, and the reference those of a NumPy table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import quantize as oracle

from pallas_kernels import residual_nvfp4
from pallas_kernels.residual_nvfp4 import reference
from pallas_kernels.shapes import TINY

shapes = pytest.mark.parametrize("shape", TINY.values(), ids=TINY)
quantize, gather = jax.jit(reference.quantize), jax.jit(reference.gather)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def make_window(shape, dtype, seed=0):
    """Rows, labels and centroids with every hard case: ties, negative zeros, and zero, subnormal and clipped scales."""
    random = np.random.default_rng(seed)
    size = (shape.batch, shape.window, shape.model_size)
    # Multiples of an eighth, scaled: with a centroid of zero many lie halfway between two codes.
    rows = random.integers(-48, 49, size) / 8 * 2.0 ** random.integers(-3, 3, size[:2])[..., None]
    groups = rows.reshape(*size[:2], -1, 16)
    groups[:, :, 0] = 0.0
    groups[:, :, 1, ::3] = -0.0
    groups[:, :, 2] *= 2.0**-20  # a scale that rounds to zero
    groups[:, :, 3] *= 2.0**-9  # a subnormal one
    groups[:, :, 4] *= 2.0**12  # one beyond 448
    rows[:, ::2, 128:] = random.normal(size=rows[:, ::2, 128:].shape)
    labels = random.integers(-1, shape.clusters, size[:2])
    centroids = random.normal(size=(shape.batch, shape.clusters, shape.model_size))
    centroids[:, 0] = 0.0
    return jnp.asarray(rows, dtype), jnp.asarray(labels, jnp.int32), jnp.asarray(centroids, jnp.float32)


def same_bits(result, expected):
    assert result.dtype == expected.dtype
    bits = lambda x: np.asarray(x).view(np.uint8)
    np.testing.assert_array_equal(bits(result), bits(expected))


@shapes
@dtypes
def test_quantize(run, shape, dtype):
    window = make_window(shape, dtype)
    codes, scales = run(residual_nvfp4.quantize, *window)
    expected = quantize(*window)
    same_bits(codes, expected[0])
    same_bits(scales, expected[1])


@shapes
def test_quantize_keeps_what_did_not_change(run, shape):
    window, old = make_window(shape, "float32"), quantize(*make_window(shape, "float32", seed=3))
    changed = jnp.asarray(np.random.default_rng(4).random((shape.batch, shape.window)) < 0.5)
    for found, new, kept in zip(
        run(residual_nvfp4.quantize, *window, (*old, changed)), quantize(*window), old, strict=True
    ):
        same_bits(found, np.where(np.asarray(changed)[..., None], new, kept))


@dtypes
def test_reference_equals_oracle(dtype):
    rows, labels, centroids = make_window(TINY["two tiles"], dtype)
    codes, scales = quantize(rows, labels, centroids)
    chosen = np.take_along_axis(np.asarray(centroids), np.maximum(labels, 0)[..., None], axis=1)
    residual = np.asarray(rows, np.float32) - chosen
    expected = [oracle.nvfp4(row) for row in residual[0]]
    nibbles = np.stack([np.asarray(codes) & 15, np.asarray(codes) >> 4], axis=-1).reshape(rows.shape)
    np.testing.assert_array_equal(nibbles[0], [e[0] for e in expected])
    np.testing.assert_array_equal(scales[0], np.array([e[1] for e in expected], np.uint8))
    assert {0, 126} <= set(np.unique(scales)) and 8 in np.unique(nibbles), "no hard cases are left in the test's rows"
    everything = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    back = gather(codes, scales, labels, centroids, everything, rows, jnp.zeros_like(labels, bool))
    decoded = np.array([e[2] for e in expected]) + chosen[0]
    np.testing.assert_array_equal(back[0], jnp.asarray(decoded, jnp.float32).astype(dtype))


@shapes
@dtypes
def test_gather(run, shape, dtype):
    window = make_window(shape, dtype)
    codes, scales = quantize(*window)
    random = np.random.default_rng(1)
    index = jnp.asarray(random.integers(-1, shape.window + 1, (shape.batch, shape.selected)), jnp.int32)
    packet, _, _ = make_window(shape, dtype, seed=2)
    changed = jnp.asarray(random.random((shape.batch, shape.window)) < 0.5)
    arguments = codes, scales, *window[1:], index, packet, changed
    same_bits(run(residual_nvfp4.gather, *arguments), gather(*arguments))
