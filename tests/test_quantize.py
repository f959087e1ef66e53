"""Code formats against NumPy tables, against the casts of ml_dtypes and jax, and their own contracts."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import quantize as oracle

from polestar_jax.quantize import FORMATS, bytes_per_row, dequantize, quantize

B, D = 4, 64
code = functools.partial(jax.jit, static_argnames=("format", "tensor_scale"))(quantize)
decode = functools.partial(jax.jit, static_argnames="format")(dequantize)
coded = pytest.mark.parametrize("format", [f for f in FORMATS if f != "none"])
# A failure is not shrunk: that takes minutes, and the arrays that come out say no more.
reproducible = settings(derandomize=True, deadline=None, max_examples=40, phases=[Phase.explicit, Phase.generate])

# Half of the elements lie on a coarse grid, so that values halfway between two codes are common; the exponents range
# over zero scales, subnormal E4M3 scales and scales beyond 448.
magnitudes = st.one_of(st.integers(-96, 96).map(lambda i: i / 8), st.floats(-8, 8, width=32))
rows = st.builds(
    lambda x, exponents: np.where(np.abs(x) < 2.0**-40, 0, x) * np.float32(2) ** exponents,
    hnp.arrays(np.float32, (B, D), elements=magnitudes),
    hnp.arrays(np.int32, (B, 1), elements=st.integers(-12, 14)),
).map(lambda x: x.astype(np.float32))


def unpack(codes, format):
    values = np.asarray(codes.values)
    bits = {"int2": 2, "mxfp4": 4, "nvfp4": 4}.get(format, 8)
    if bits == 8:
        return values
    return np.stack([(values >> s) & (2**bits - 1) for s in range(0, 8, bits)], axis=-1).reshape(*values.shape[:-1], -1)


@coded
@given(x=rows)
@reproducible
def test_equals_oracle(x, format):
    codes = code(x, format)
    expected = [getattr(oracle, format)(row) for row in x]
    np.testing.assert_array_equal(unpack(codes, format), [e[0] for e in expected])
    np.testing.assert_array_equal(codes.scales, np.array([e[1] for e in expected], codes.scales.dtype))
    np.testing.assert_allclose(decode(codes, format), [e[2] for e in expected], rtol=1e-6)


def test_tensor_scale_equals_oracle():
    """On continuous values: a quotient by two scales may fall to either side of a boundary that it lies on."""
    x = np.random.default_rng(2).normal(size=(32, D)) * np.logspace(-8, 8, 32)[:, None]
    x = x.astype(np.float32)
    codes = code(x, "nvfp4", tensor_scale=True)
    expected = [oracle.nvfp4(row, tensor_scale=True) for row in x]
    np.testing.assert_array_equal(unpack(codes, "nvfp4"), [e[0] for e in expected])
    np.testing.assert_array_equal(codes.scales, [e[1] for e in expected])
    np.testing.assert_allclose(codes.tensor_scale[:, 0], np.abs(x).max(axis=1) / 2688, rtol=1e-6)
    np.testing.assert_allclose(decode(codes, "nvfp4"), [e[2] for e in expected], rtol=1e-6)


@coded
@given(x=rows)
@reproducible
def test_properties(x, format):
    codes = code(x, format)
    y = np.asarray(decode(codes, format))
    assert np.all(np.isfinite(y)) and np.all(y[~x.any(axis=-1)] == 0)
    # Sign symmetry, except that int2 has no zero and gives it a positive level.
    mirrored = np.asarray(decode(code(-x, format), format))
    signed = x != 0
    np.testing.assert_array_equal(mirrored[signed], -y[signed])
    # Batch rows are independent: any order and company gives the same codes.
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[::-1], b), codes, code(x[::-1], format))
    # Idempotent, unless a subnormal E4M3 scale was rounded far from amax / 6.
    normal = np.ones((B, 1), bool)
    if format == "nvfp4":
        normal = np.repeat((np.asarray(codes.scales) & 127) >= 8, 16, axis=-1)
    again = np.asarray(decode(code(y, format), format))
    np.testing.assert_allclose(np.where(normal, again, 0), np.where(normal, y, 0), rtol=3e-7)
    # Error bounds.
    scales, error, size = np.asarray(codes.scales), np.abs(y - x), np.abs(x)
    match format:
        case "fp8":
            assert np.all(error <= size / 16 + scales * 2.0**-10)
        case "int8" | "int2":
            assert np.all(error <= 0.5001 * scales)
        case "mxfp4":
            assert np.all(error <= 2 * np.repeat(2.0 ** (scales - 127.0), 32, axis=-1))
        case "nvfp4":
            step = oracle.value(scales, oracle.E4M3)
            assert np.all((error <= np.repeat(step, 16, axis=-1)) | ~normal | (size > 6 * 448))


def neighbours(values):
    values = np.float32(values)
    return np.concatenate([np.nextafter(values, np.float32(-np.inf)), values, np.nextafter(values, np.float32(np.inf))])


def test_e2m1_equals_float4_cast():
    """Every magnitude, every boundary and the floats beside them; a 6 in each group makes its scale one."""
    edges = np.concatenate([oracle.E2M1, (oracle.E2M1[1:] + oracle.E2M1[:-1]) / 2])
    x = neighbours(edges[edges < 6])
    x = np.concatenate([x, -x, [0.0, -0.0]]).astype(np.float32)
    x = np.concatenate([x, np.zeros(-len(x) % 15, np.float32)]).reshape(-1, 15)
    x = np.concatenate([x, np.full((len(x), 1), 6, np.float32)], axis=1)
    codes = code(x, "nvfp4")
    assert np.all(np.asarray(codes.scales) == 7 << 3)
    packed = jax.lax.bitcast_convert_type(jnp.asarray(x).astype(jnp.float4_e2m1fn).reshape(len(x), 8, 2), jnp.uint8)
    np.testing.assert_array_equal(codes.values, packed)
    np.testing.assert_array_equal(decode(codes, "nvfp4"), x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_e4m3_equals_float8_cast():
    """The same for E4M3, as values ("fp8", where 448 makes the row's scale one) and as scales ("nvfp4")."""
    edges = np.concatenate([oracle.E4M3, (oracle.E4M3[1:] + oracle.E4M3[:-1]) / 2])
    x = neighbours(edges[(edges < 448) & (edges > 0)])
    x = np.concatenate([x, -x, [0.0, -0.0, 448.0]]).astype(np.float32)
    cast = x.astype(ml_dtypes.float8_e4m3fn)
    values = code(x[None], "fp8")
    np.testing.assert_array_equal(values.values[0], cast.view(np.uint8))
    np.testing.assert_array_equal(decode(values, "fp8")[0], cast.astype(np.float32))

    amax = np.abs(x[:-3, None] * np.ones((1, 16), np.float32)) * np.float32(6)
    scale = (amax[:, 0] / np.float32(6)).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(code(amax, "nvfp4").scales[:, 0], scale.view(np.uint8))


def test_rounded_scale_divides():
    """amax 6.3 has scale 1.05, rounded to 1: 5.1 becomes 6, where 5.1 / 1.05 < 5 would give 4."""
    x = np.zeros((1, 16), np.float32)
    x[0, :2] = 6.3, 5.1
    np.testing.assert_array_equal(decode(code(x, "nvfp4"), "nvfp4")[0, :3], [6, 6, 0])


@pytest.mark.parametrize("amax", [448 * 6 * 1.01, 1e6, 3e38])
def test_large_scales_saturate(amax):
    x = np.full((1, 16), amax, np.float32)
    codes = code(x, "nvfp4")
    assert np.asarray(codes.scales).item() == 0b1111110
    assert np.all(np.asarray(decode(codes, "nvfp4")) == 448 * 6)
    np.testing.assert_allclose(decode(code(x, "nvfp4", tensor_scale=True), "nvfp4"), x, rtol=1e-6)


def test_small_scales():
    """The smallest E4M3 scale is 2**-9; half of it rounds to zero, and so do the codes, signs included."""
    x = np.array([6 * 2.0**-9, -6 * 2.0**-10, -6 * 2.0**-11], np.float32)[:, None] * np.ones((1, 16), np.float32)
    codes = code(x, "nvfp4")
    np.testing.assert_array_equal(np.asarray(codes.scales)[:, 0], [1, 0, 0])
    np.testing.assert_array_equal(decode(codes, "nvfp4")[:, 0], [6 * 2.0**-9, 0, 0])
    assert not np.any(np.asarray(codes.values)[1:])
    with_second = decode(code(x, "nvfp4", tensor_scale=True), "nvfp4")
    np.testing.assert_allclose(with_second, x, rtol=1e-6)


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_jit_changes_no_bit(format):
    """Fused or operation by operation."""
    x = np.random.default_rng(0).normal(size=(64, D)).astype(np.float32)
    jax.tree.map(np.testing.assert_array_equal, code(x, format), quantize(jnp.asarray(x), format))


@coded
def test_leaves_lead_with_the_rows(format):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, D)), jnp.bfloat16)
    codes = code(x, format, tensor_scale=format == "nvfp4")
    assert all(leaf.shape[:2] == (2, 3) for leaf in jax.tree.leaves(codes))
    assert decode(codes, format).shape == x.shape and decode(codes, format).dtype == jnp.float32
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(codes)) == 6 * bytes_per_row(
        format, D, tensor_scale=format == "nvfp4"
    )


def test_none_keeps_rows():
    x = jnp.ones((2, 7), jnp.bfloat16)
    codes = quantize(x, "none")
    assert codes.values is x and dequantize(codes, "none") is x
    assert bytes_per_row("none", 7) == 14 and bytes_per_row("none", 7, itemsize=4) == 28


def test_bytes_of_the_paper():
    """Section 4.3's window of 96 rows at D = 4096: 0.22 MB of residuals per layer."""
    assert 96 * bytes_per_row("nvfp4", 4096) == 221184


@pytest.mark.parametrize(
    "format, size, tensor_scale, named",
    [
        ("nvfp4", 40, False, "D = 40 is not a multiple of 16.*pad the rows to 48"),
        ("mxfp4", 48, False, "D = 48 is not a multiple of 32.*pad the rows to 64"),
        ("int2", 6, False, "D = 6 is not a multiple of 4.*pad the rows to 8"),
        ("int8", 64, True, "tensor_scale=True is for format='nvfp4'"),
    ],
)
def test_refused(format, size, tensor_scale, named):
    with pytest.raises(ValueError, match=named):
        quantize(jnp.ones((2, size)), format, tensor_scale=tensor_scale)
    with pytest.raises(ValueError, match=named):
        bytes_per_row(format, size, tensor_scale=tensor_scale)
