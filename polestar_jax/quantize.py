"""Codes of the window's hidden states (paper section C.3 and table 11).

A row, be it a hidden state or its residual to a centroid, is coded by itself: no code depends on another row of the
window or of the batch. Codes are made and read by integer and float32 arithmetic, as few GPUs cast to 4-bit floats.
"""

import functools
import operator
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from polestar_jax.types import pytree

Format = Literal["none", "fp8", "int8", "mxfp4", "int2", "nvfp4"]
FORMATS: tuple[Format, ...] = get_args(Format)


class _Layout(NamedTuple):
    group: int  # values per scale, 0 for the whole row
    bits: int  # per value
    scale_bytes: int
    largest: float  # what amax is divided by


_LAYOUTS = {
    "fp8": _Layout(0, 8, 4, 448.0),
    "int8": _Layout(0, 8, 4, 127.0),
    "int2": _Layout(0, 2, 4, 1.5),
    "mxfp4": _Layout(32, 4, 1, 6.0),
    "nvfp4": _Layout(16, 4, 1, 6.0),
}
_E4M3_LARGEST = 448.0
# Halfway between neighbours among the E2M1 magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@pytree
class Codes:
    """Coded rows. Every leaf leads with the axes of the rows, so that the same scatter replaces rows in each.

    Attributes:
      values: `[..., D]` as given ("none"), E4M3 in uint8 ("fp8") or int8 ("int8"); uint8 `[..., D/2]` with two E2M1
        ("mxfp4", "nvfp4") or `[..., D/4]` with four signs and magnitudes ("int2"), the first in the lowest bits.
      scales: float32 `[..., 1]` ("fp8", "int8", "int2"), E8M0 in uint8 `[..., D/32]` ("mxfp4"), E4M3 in uint8
        `[..., D/16]` ("nvfp4"), or None ("none").
      tensor_scale: float32 `[..., 1]`, a second scale of "nvfp4" on request, else None.
    """

    values: jax.Array
    scales: jax.Array | None = None
    tensor_scale: jax.Array | None = None


def bytes_per_row(format: Format, size: int, *, itemsize: int = 2, tensor_scale: bool = False) -> int:
    """Bytes of one coded row of D = `size` values; `itemsize` is that of an uncoded one. Raises as `quantize` does."""
    _check(format, size, tensor_scale)
    if format == "none":
        return size * itemsize
    layout = _LAYOUTS[format]
    return size * layout.bits // 8 + size // (layout.group or size) * layout.scale_bytes + 4 * tensor_scale


def quantize(rows: Float[Array, "... D"], format: Format, *, tensor_scale: bool = False) -> Codes:
    """Codes rows, rounding to nearest, ties to even, saturating.

    * "nvfp4": E2M1 values in groups of 16. The scale, amax / 6 of the group, is rounded to E4M3 and at most 448; values
      are divided by the *rounded* scale; where that is zero, so are the codes.
    * "mxfp4": E2M1 values in groups of 32. The scale is 2 ** (floor(log2(amax)) - 2), as in OCP MX: values above 6
      scales saturate. The exponent is at least -124, below which products of float32 are flushed to zero.
    * "fp8" and "int8": E4M3 and -127 .. 127, with one float32 scale per row, amax / 448 and amax / 127.
    * "int2": +-0.5 and +-1.5 times one float32 scale per row, amax / 1.5; magnitudes up to the scale become 0.5.
    * "none": the rows themselves.

    Args:
      rows: coded along the last axis, in float32.
      format: one of `FORMATS`.
      tensor_scale: divide the scales of "nvfp4" by a float32 amax / (448 * 6) first, NVIDIA's scale per tensor. The
        tensor is one row here, because rows are coded anew one by one.

    Raises:
      ValueError: for an unknown format, a D that it cannot group or pack, or a tensor scale that it does not have.
    """
    _check(format, rows.shape[-1], tensor_scale)
    if format == "none":
        return Codes(rows)
    layout = _LAYOUTS[format]
    blocks = rows.astype(jnp.float32).reshape(*rows.shape[:-1], -1, layout.group or rows.shape[-1])
    amax = jnp.max(jnp.abs(blocks), axis=-1)
    scales, second = _divide(amax, layout.largest), None
    if tensor_scale:
        second = _divide(jnp.max(amax, axis=-1, keepdims=True), _E4M3_LARGEST * layout.largest)
        scales = scales / jnp.where(second > 0, second, 1.0)
    if format == "nvfp4":
        scales = _encode_e4m3(scales)
    elif format == "mxfp4":
        scales = (jnp.maximum(_exponent(amax) - 2, -124) + 127).astype(jnp.uint8)
    step = _step(format, scales, second)[..., None]
    ratio = blocks / jnp.where(step > 0, step, 1.0)
    match format:
        case "fp8":
            codes = _encode_e4m3(ratio)
        case "int8":
            codes = jnp.clip(jnp.round(ratio), -127, 127).astype(jnp.int8)
        case "int2":
            codes = jnp.where(blocks < 0, 2, 0).astype(jnp.uint8) | (jnp.abs(blocks) > step).astype(jnp.uint8)
        case _:
            codes = _encode_e2m1(blocks, step)
    return Codes(_pack(codes.reshape(rows.shape), layout.bits), scales, second)


def dequantize(codes: Codes, format: Format) -> Float[Array, "... D"]:
    """The float32 rows that codes stand for; "none" returns its rows in their own dtype."""
    if format == "none":
        return codes.values
    values = _unpack(codes.values, _LAYOUTS[format].bits)
    match format:
        case "fp8":
            levels = _decode(values, bits=8, mantissa=3, bias=7)
        case "int8":
            levels = values.astype(jnp.float32)
        case "int2":
            levels = jnp.where(values & 2, -1.0, 1.0) * jnp.where(values & 1, 1.5, 0.5)
        case _:
            levels = _decode(values, bits=4, mantissa=1, bias=1)
    step = _step(format, codes.scales, codes.tensor_scale)
    return (levels.reshape(*step.shape, -1) * step[..., None]).reshape(values.shape)


def _check(format: str, size: int, tensor_scale: bool) -> None:
    if format not in FORMATS:
        raise ValueError(f"{format=} must be one of {', '.join(FORMATS)}")
    if tensor_scale and format != "nvfp4":
        raise ValueError(f"{tensor_scale=} is for format='nvfp4', not {format=}")
    group = 1 if format == "none" else _LAYOUTS[format].group or 8 // _LAYOUTS[format].bits
    if size % group:
        remedy = f"pad the rows to {size + -size % group} or use fp8, int8 or none, which have no groups"
        raise ValueError(f"D = {size} is not a multiple of {group}, the group of {format=}: {remedy}")


def _divide(x: Float[Array, "..."], divisor: float) -> Float[Array, "..."]:
    """`x / divisor`, correctly rounded. XLA turns a constant divisor into a product with its rounded inverse."""
    return x / jnp.where(x > 0, divisor, 1.0)


def _exponent(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """floor(log2(x)) of positive normal float32; -127 for zero."""
    return (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def _power(exponent: Int[Array, "..."]) -> Float[Array, "..."]:
    """2 ** exponent, exactly, for -126 .. 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _step(format: Format, scales: Any, tensor_scale: Any) -> Float[Array, "... G"]:
    """What one unit of each group's values is worth."""
    if format == "mxfp4":
        return _power(scales.astype(jnp.int32) - 127)
    if format != "nvfp4":
        return scales
    return _decode(scales, bits=8, mantissa=3, bias=7) * (1.0 if tensor_scale is None else tensor_scale)


def _encode_e4m3(x: Float[Array, "..."]) -> Array:
    magnitude = jnp.minimum(jnp.abs(x), _E4M3_LARGEST)
    exponent = jnp.maximum(_exponent(magnitude), -6)
    # In units of the last place: a carry out of them gives the first code of the next binade, as it should.
    units = jnp.round(magnitude * _power(3 - exponent)).astype(jnp.int32)
    return (units + 8 * (exponent + 6) + jnp.where(jnp.signbit(x), 128, 0)).astype(jnp.uint8)


def _encode_e2m1(x: Float[Array, "..."], step: Float[Array, "..."]) -> Array:
    """Rounds x / step by comparing |x| with boundary * step: exact, where a quotient would be rounded before it is."""
    magnitude = jnp.abs(x)
    beyond = (magnitude >= b * step if code % 2 else magnitude > b * step for code, b in enumerate(_E2M1_BOUNDARIES))
    codes = sum(b.astype(jnp.int32) for b in beyond) + jnp.where(jnp.signbit(x), 8, 0)
    return jnp.where(step > 0, codes, 0).astype(jnp.uint8)


def _decode(codes: Array, *, bits: int, mantissa: int, bias: int) -> Float[Array, "..."]:
    """Reads small floats without infinities: sign, exponent, mantissa."""
    codes = codes.astype(jnp.int32)
    field = (codes >> mantissa) & ((1 << (bits - 1 - mantissa)) - 1)
    significand = (codes & ((1 << mantissa) - 1)) + jnp.where(field > 0, 1 << mantissa, 0)
    value = significand.astype(jnp.float32) * _power(jnp.maximum(field, 1) - (bias + mantissa))
    return jnp.where((codes >> (bits - 1)) & 1 == 1, -value, value)


def _pack(codes: Array, bits: int) -> Array:
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    return functools.reduce(operator.or_, [parts[..., i] << (bits * i) for i in range(8 // bits)])


def _unpack(packed: Array, bits: int) -> Array:
    parts = [packed >> (bits * i) for i in range(8 // bits)]
    return jnp.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)
