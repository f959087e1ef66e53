"""Residual NVFP4 in Triton, for compute capability 8.0 to 8.9: one program per row and up to 1024 columns."""

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.launch import launch_triton

GROUPS = 64
_GROUP = 16


def quantize(rows: jax.Array, labels: jax.Array, centroids: jax.Array, kept=None) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.residual_nvfp4.quantize`."""
    batch, window, size = rows.shape
    groups = size // _GROUP
    run = functools.partial(
        launch_triton,
        _quantize,
        grid=(window, batch, triton.cdiv(groups, GROUPS)),
        clusters=centroids.shape[1],
        groups=groups,
        BLOCK=GROUPS,
    )
    source = jnp.maximum(labels, 0)
    if kept is None:
        places = ((batch, window, size // 2), (batch, window, groups))
        return run(rows, source, centroids, out_type=tuple(jax.ShapeDtypeStruct(each, jnp.uint8) for each in places))
    # Which centroid, or -1 where the old codes stay.
    codes, scales = (jax.new_ref(old) for old in kept[:2])
    run(rows, jnp.where(kept[2], source, -1), centroids, codes, scales, out_type=())
    return jax.freeze(codes), jax.freeze(scales)


def gather(
    codes: jax.Array,
    scales: jax.Array,
    labels: jax.Array,
    centroids: jax.Array,
    index: jax.Array,
    packet: jax.Array,
    changed: jax.Array,
) -> jax.Array:
    """See `pallas_kernels.residual_nvfp4.gather`."""
    batch, window, size = packet.shape
    count, groups = index.shape[1], size // _GROUP
    return launch_triton(
        _gather,
        codes,
        scales,
        labels,
        centroids,
        index,
        packet,
        changed.astype(jnp.uint8),
        out_type=jax.ShapeDtypeStruct((batch, count, size), packet.dtype),
        grid=(count, batch, triton.cdiv(groups, GROUPS)),
        window=window,
        clusters=centroids.shape[1],
        groups=groups,
        BLOCK=GROUPS,
    )


@triton.jit
def _quantize(
    rows_ref,
    labels_ref,
    centroids_ref,
    codes_ref,
    scales_ref,
    clusters: tl.constexpr,
    groups: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(1)
    row = batch * tl.num_programs(0) + tl.program_id(0)
    group = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    real = group < groups
    at = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    # The row's label, for every group: the masks below are of that shape.
    label = tl.load(labels_ref + row + tl.zeros((BLOCK,), tl.int32))
    coded = real & (label >= 0)
    cluster = batch * clusters + label[:, None]
    anchor = tl.load(centroids_ref + cluster * groups * 16 + at, mask=coded[:, None], other=0.0)
    x = tl.load(rows_ref + row * groups * 16 + at, mask=coded[:, None], other=0.0).to(tl.float32) - anchor
    magnitude = tl.abs(x)
    # A plain quotient would be an approximate one.
    scale = _encode_e4m3(tl.div_rn(tl.max(magnitude, axis=1), tl.full((BLOCK,), 6.0, tl.float32)))
    step = _decode(scale, 3, 4, 7)[:, None]
    code = (magnitude > 0.25 * step).to(tl.int32) + (magnitude >= 0.75 * step).to(tl.int32)
    code += (magnitude > 1.25 * step).to(tl.int32) + (magnitude >= 1.75 * step).to(tl.int32)
    code += (magnitude > 2.5 * step).to(tl.int32) + (magnitude >= 3.5 * step).to(tl.int32)
    code += (magnitude > 5.0 * step).to(tl.int32)
    code += tl.where(x.to(tl.int32, bitcast=True) < 0, 8, 0)
    code = tl.where(step > 0, code, 0)
    low, high = tl.split(tl.reshape(code, (BLOCK, 8, 2)))
    half = row * groups * 8 + group[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(codes_ref + half, (low | (high << 4)).to(tl.uint8), mask=coded[:, None])
    tl.store(scales_ref + row * groups + group, scale.to(tl.uint8), mask=coded)


@triton.jit
def _gather(
    codes_ref,
    scales_ref,
    labels_ref,
    centroids_ref,
    index_ref,
    packet_ref,
    changed_ref,
    out_ref,
    window: tl.constexpr,
    clusters: tl.constexpr,
    groups: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(1)
    place = batch * tl.num_programs(0) + tl.program_id(0)
    chosen = tl.minimum(tl.maximum(tl.load(index_ref + place), 0), window - 1)
    row = batch * window + chosen
    group = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    real = group < groups
    at = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    out = out_ref + place * groups * 16 + at
    if tl.load(changed_ref + row) != 0:
        tl.store(out, tl.load(packet_ref + row * groups * 16 + at, mask=real[:, None]), mask=real[:, None])
    else:
        half = group[:, None] * 8 + tl.arange(0, 8)[None, :]
        byte = tl.load(codes_ref + row * groups * 8 + half, mask=real[:, None], other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (BLOCK, 16))
        scale = tl.load(scales_ref + row * groups + group, mask=real, other=0).to(tl.int32)
        cluster = batch * clusters + tl.maximum(tl.load(labels_ref + row), 0)
        anchor = tl.load(centroids_ref + cluster * groups * 16 + at, mask=real[:, None], other=0.0)
        value = _decode(code, 1, 2, 1) * _decode(scale, 3, 4, 7)[:, None] + anchor
        tl.store(out, _round_to(value, out_ref.dtype.element_ty), mask=real[:, None])


@triton.jit
def _round_to(x, dtype: tl.constexpr):
    # Written out, because Triton's interpreter cuts the last bits off instead of rounding.
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x


@triton.jit
def _encode_e4m3(x):
    magnitude = tl.minimum(x, 448.0)
    binade = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    scaled = magnitude * ((130 - binade) << 23).to(tl.float32, bitcast=True)
    # Adding and taking away 2 ** 23 rounds to nearest, ties to even.
    return ((scaled + 8388608.0) - 8388608.0).to(tl.int32) + 8 * (binade + 6)


@triton.jit
def _decode(codes, mantissa: tl.constexpr, fields: tl.constexpr, bias: tl.constexpr):
    field = (codes >> mantissa) & ((1 << fields) - 1)
    significand = (codes & ((1 << mantissa) - 1)) + tl.where(field > 0, 1 << mantissa, 0)
    power = ((tl.maximum(field, 1) - (bias + mantissa) + 127) << 23).to(tl.float32, bitcast=True)
    value = significand.to(tl.float32) * power
    return tl.where(((codes >> (mantissa + fields)) & 1) == 1, -value, value)
