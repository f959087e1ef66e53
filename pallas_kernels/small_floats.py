"""Floats of 4 and 8 bits by integer and float32 arithmetic: the one definition of references, kernels and codecs.

Few GPUs cast to 4-bit floats, and XLA's cast to E4M3 does not saturate; integer arithmetic is the same everywhere.
"""

import functools
import operator

import jax
import jax.numpy as jnp

E4M3_LARGEST = 448.0
E2M1_LARGEST = 6.0
E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbours among the E2M1 magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6."""


def divide(x: jax.Array, divisor: float) -> jax.Array:
    """`x / divisor` of `x >= 0`: a quotient, where XLA makes a product with its inverse of a constant divisor.

    GPUs may be one unit off in its last place, in kernels and in XLA alike, which E4M3 does not see.
    """
    return x / jnp.where(x > 0, divisor, 1.0)


def exponent(x: jax.Array) -> jax.Array:
    """floor(log2(x)) of positive normal float32; -127 for zero."""
    return (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def power(exponent: jax.Array) -> jax.Array:
    """2 ** exponent, exactly, for -126 .. 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def encode_e4m3(x: jax.Array) -> jax.Array:
    """E4M3 codes, int32: float32 rounded to nearest, ties to even, saturating at 448."""
    magnitude = jnp.minimum(jnp.abs(x), E4M3_LARGEST)
    binade = jnp.maximum(exponent(magnitude), -6)
    # In units of the last place: a carry out of them gives the first code of the next binade, as it should.
    units = jnp.round(magnitude * power(3 - binade)).astype(jnp.int32)
    return units + 8 * (binade + 6) + jnp.where(jnp.signbit(x), 128, 0)


def encode_e2m1(x: jax.Array, step: jax.Array) -> jax.Array:
    """E2M1 codes, int32, of x / step: to nearest, ties to even, saturating at 6; 0 where the step is.

    |x| is compared with boundary * step: exact, where a quotient would be rounded before it is.
    """
    magnitude = jnp.abs(x)
    beyond = (magnitude >= b * step if code % 2 else magnitude > b * step for code, b in enumerate(E2M1_BOUNDARIES))
    codes = sum(b.astype(jnp.int32) for b in beyond) + jnp.where(jnp.signbit(x), 8, 0)
    return jnp.where(step > 0, codes, 0)


def decode(codes: jax.Array, *, bits: int, mantissa: int, bias: int) -> jax.Array:
    """Reads small floats without infinities: sign, exponent, mantissa."""
    codes = codes.astype(jnp.int32)
    field = (codes >> mantissa) & ((1 << (bits - 1 - mantissa)) - 1)
    significand = (codes & ((1 << mantissa) - 1)) + jnp.where(field > 0, 1 << mantissa, 0)
    value = significand.astype(jnp.float32) * power(jnp.maximum(field, 1) - (bias + mantissa))
    return jnp.where((codes >> (bits - 1)) & 1 == 1, -value, value)


decode_e4m3 = functools.partial(decode, bits=8, mantissa=3, bias=7)
decode_e2m1 = functools.partial(decode, bits=4, mantissa=1, bias=1)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """uint8 codes `[..., n]` -> `[..., n * bits / 8]`, the first in the lowest bits."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    return functools.reduce(operator.or_, [parts[..., i] << (bits * i) for i in range(8 // bits)])


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """The inverse of `pack`; bits above the code's are those of its neighbours."""
    each = jnp.broadcast_to(packed[..., None], (*packed.shape, 8 // bits))
    # Shifted by a plane, not stacked of shifted arrays, which XLA would write out and read again.
    shift = bits * jax.lax.broadcasted_iota(packed.dtype, each.shape, each.ndim - 1)
    return (each >> shift).reshape(*packed.shape[:-1], -1)
