"""Codes of the window's hidden states (paper section C.3 and table 11).

A row, be it a hidden state or its residual to a centroid, is coded by itself: no code depends on another row of the
window or of the batch. Codes are made and read by integer and float32 arithmetic, as few GPUs cast to 4-bit floats.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.small_floats import (
    E4M3_LARGEST,
    decode_e2m1,
    decode_e4m3,
    divide,
    encode_e2m1,
    encode_e4m3,
    exponent,
    pack,
    power,
    unpack,
)
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
    scales, second = divide(amax, layout.largest), None
    if tensor_scale:
        second = divide(jnp.max(amax, axis=-1, keepdims=True), E4M3_LARGEST * layout.largest)
        scales = scales / jnp.where(second > 0, second, 1.0)
    if format == "nvfp4":
        scales = encode_e4m3(scales).astype(jnp.uint8)
    elif format == "mxfp4":
        scales = (jnp.maximum(exponent(amax) - 2, -124) + 127).astype(jnp.uint8)
    step = _step(format, scales, second)[..., None]
    ratio = blocks / jnp.where(step > 0, step, 1.0)
    match format:
        case "fp8":
            codes = encode_e4m3(ratio).astype(jnp.uint8)
        case "int8":
            codes = jnp.clip(jnp.round(ratio), -127, 127).astype(jnp.int8)
        case "int2":
            codes = jnp.where(blocks < 0, 2, 0).astype(jnp.uint8) | (jnp.abs(blocks) > step).astype(jnp.uint8)
        case _:
            codes = encode_e2m1(blocks, step).astype(jnp.uint8)
    return Codes(pack(codes.reshape(rows.shape), layout.bits), scales, second)


def dequantize(codes: Codes, format: Format) -> Float[Array, "... D"]:
    """The float32 rows that codes stand for; "none" returns its rows in their own dtype."""
    if format == "none":
        return codes.values
    values = unpack(codes.values, _LAYOUTS[format].bits)
    match format:
        case "fp8":
            levels = decode_e4m3(values)
        case "int8":
            levels = values.astype(jnp.float32)
        case "int2":
            levels = jnp.where(values & 2, -1.0, 1.0) * jnp.where(values & 1, 1.5, 0.5)
        case _:
            levels = decode_e2m1(values)
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


def _step(format: Format, scales: Any, tensor_scale: Any) -> Float[Array, "... G"]:
    """What one unit of each group's values is worth."""
    if format == "mxfp4":
        return power(scales.astype(jnp.int32) - 127)
    if format != "nvfp4":
        return scales
    return decode_e4m3(scales) * (1.0 if tensor_scale is None else tensor_scale)
