"""Residual NVFP4 in Pallas Mosaic GPU, for compute capability 9.0 and later.

One block treats 64 rows and 256 columns, 64 columns at a time. Two 4-bit codes meet in one byte on the tensor cores:
neighbours in a row sit in registers of different shapes than their byte does, and a product with a 0 / 1 / 16 matrix
moves and joins them, exactly, as small integers are exact in bfloat16. The same trick copies bytes apart again.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.small_floats import E2M1_BOUNDARIES, E2M1_LARGEST, E4M3_LARGEST, exponent, power
from pallas_kernels.tiles import PER_COLUMN, PER_ROW, ROWS, full, load, multiply, positions, spread_columns, spread_rows

COLUMNS = 256
"""A scale row of a tile is then 16 bytes, the least that the copy engine moves."""

_CHUNK = 64
_CHUNKS = COLUMNS // _CHUNK
_GROUP = 16


@jax.jit  # the layers of a decode then share one lowering, which takes seconds
def quantize(rows: jax.Array, labels: jax.Array, centroids: jax.Array, kept=None) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.residual_nvfp4.quantize`."""
    batch, window, size = rows.shape
    # Rows are copied by eight. Scales that are one tile wide go out in one piece, which would end in the next sequence.
    if surplus := -window % (ROWS if size == COLUMNS and batch > 1 else 8):
        grow = lambda leaf: jnp.pad(leaf, ((0, 0), (0, surplus)) + ((0, 0),) * (leaf.ndim - 2))
        coded = quantize(grow(rows), grow(labels), centroids, jax.tree.map(grow, kept))
        return coded[0][:, :window], coded[1][:, :window]
    clusters = centroids.shape[1]
    tiles = pl.cdiv(window, ROWS)
    # Which centroid, or -1 where the old codes stay.
    source = jnp.maximum(labels, 0)
    source = source if kept is None else jnp.where(kept[2], source, -1)

    def body(rows_ref, labels_ref, centroids_ref, codes_ref, scales_ref, scratch):
        row_smem, label_smem, centroid_smem, code_smem, join_smem, byte_smem, scale_smem, barrier = scratch
        batch_index, at_rows, column = lax.axis_index("batch"), _tile("rows", ROWS), lax.axis_index("columns")
        at_columns = pl.ds(column * COLUMNS, COLUMNS)
        for chunk in range(_CHUNKS):
            here = pl.ds(column * COLUMNS + chunk * _CHUNK, _CHUNK)
            plgpu.copy_gmem_to_smem(rows_ref.at[batch_index, at_rows, here], row_smem.at[chunk], barrier)
        plgpu.copy_gmem_to_smem(labels_ref.at[batch_index, at_rows], label_smem, barrier)
        plgpu.copy_gmem_to_smem(centroids_ref.at[batch_index, :, :, at_columns], centroid_smem, barrier)
        places = []
        for chunk in range(_CHUNKS):
            here = pl.ds(column * (COLUMNS // 2) + chunk * (_CHUNK // 2), _CHUNK // 2)
            places.append((byte_smem.at[chunk], codes_ref.at[batch_index, at_rows, here]))
        at_scales = pl.ds(column * (COLUMNS // _GROUP), COLUMNS // _GROUP)
        places.append((scale_smem, scales_ref.at[batch_index, at_rows, at_scales]))
        if kept is not None:
            for smem, gmem in places:
                plgpu.copy_gmem_to_smem(gmem, smem, barrier)
        _, place = positions((ROWS, _CHUNK))
        code, byte = positions((_CHUNK, _CHUNK // 2))
        high = jnp.where(code == 2 * byte + 1, 16.0, 0.0)
        join_smem[...] = jnp.where(code == 2 * byte, 1.0, high).astype(jnp.bfloat16)
        plgpu.barrier_wait(barrier)
        per_row = load(label_smem, PER_ROW)
        label = spread_rows(per_row, _CHUNK)

        def merge(new, smem):
            if kept is None:
                return new.astype(jnp.uint8)
            old = load(smem).astype(jnp.int32)
            return jnp.where(spread_rows(per_row, new.shape[1]) < 0, old, new).astype(jnp.uint8)

        def treat(chunk, scales):
            here = pl.ds(chunk * _CHUNK, _CHUNK)
            residual = load(row_smem.at[chunk]).astype(jnp.float32)
            residual = residual - _centroid_of(centroid_smem, here, label, clusters)
            step = full((ROWS, _CHUNK), 0.0)
            _, scale_column = positions((ROWS, COLUMNS // _GROUP))
            for group in range(_CHUNK // _GROUP):
                inside = place >> 4 == group
                amax = jnp.max(jnp.where(inside, jnp.abs(residual), 0.0), axis=1)
                scale = _encode_e4m3(amax / E2M1_LARGEST)
                step = jnp.where(inside, spread_rows(_decode(scale, 3, 4, 7), _CHUNK), step)
                this = scale_column == chunk * (_CHUNK // _GROUP) + group
                scales = jnp.where(this, spread_rows(scale, COLUMNS // _GROUP), scales)
            code_smem[...] = _encode_e2m1(residual, step).astype(jnp.float32).astype(jnp.bfloat16)
            plgpu.commit_smem()
            packed = multiply(_CHUNK // 2, (code_smem, join_smem)).astype(jnp.int32)
            byte_smem[chunk] = merge(packed, byte_smem.at[chunk])
            return scales

        none = full((ROWS, COLUMNS // _GROUP), 0, jnp.int32)
        scale_smem[...] = merge(lax.fori_loop(0, _CHUNKS, treat, none), scale_smem)
        plgpu.commit_smem()
        for smem, gmem in places:
            plgpu.copy_smem_to_gmem(smem, gmem)
        plgpu.wait_smem_to_gmem(0)

    out_type = (
        jax.ShapeDtypeStruct((batch, window, size // 2), jnp.uint8),
        jax.ShapeDtypeStruct((batch, window, size // _GROUP), jnp.uint8),
    )
    run = plgpu.kernel(
        body,
        out_type=out_type if kept is None else (),
        scratch_types=[
            [
                plgpu.SMEM((_CHUNKS, ROWS, _CHUNK), rows.dtype),
                plgpu.SMEM((ROWS,), jnp.int32),
                plgpu.SMEM((clusters, 1, COLUMNS), jnp.float32),
                plgpu.SMEM((ROWS, _CHUNK), jnp.bfloat16),
                plgpu.SMEM((_CHUNK, _CHUNK // 2), jnp.bfloat16),
                plgpu.SMEM((_CHUNKS, ROWS, _CHUNK // 2), jnp.uint8),
                plgpu.SMEM((ROWS, COLUMNS // _GROUP), jnp.uint8),
                plgpu.Barrier(num_arrivals=_CHUNKS + 2 + (0 if kept is None else _CHUNKS + 1)),
            ]
        ],
        grid=(batch, tiles, size // COLUMNS),
        grid_names=("batch", "rows", "columns"),
    )
    arguments = rows, source, centroids[:, :, None]
    if kept is None:
        return run(*arguments)
    codes, scales = (jax.new_ref(old) for old in kept[:2])
    run(*arguments, codes, scales)
    return jax.freeze(codes), jax.freeze(scales)


@jax.jit  # the layers of a decode then share one lowering, which takes seconds
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
    batch, clusters, size = centroids.shape
    if surplus := -index.shape[1] % 8:  # rows are copied by eight
        index = jnp.pad(index, ((0, 0), (0, surplus)))
        return gather(codes, scales, labels, centroids, index, packet, changed)[:, :-surplus]
    count = index.shape[1]
    tiles = pl.cdiv(count, ROWS)
    fetched = min(count, ROWS)  # rows of a tile; those beyond hold nothing and are not written
    # Which centroid, or -1 where the packet's row is taken.
    source = jnp.where(changed, -1, jnp.maximum(labels, 0)).astype(jnp.int32)
    source = jnp.take_along_axis(source, index, axis=1, mode="clip")
    pad = ((0, 0), (0, tiles * ROWS - count))
    source = jnp.pad(source, pad)
    index = jnp.pad(jnp.clip(index, 0, codes.shape[1] - 1), pad)

    def body(codes_ref, scales_ref, source_ref, centroids_ref, index_ref, packet_ref, out_ref, scratch):
        byte_smem, scale_smem, centroid_smem, packet_smem, wide_smem, split_smem, out_smem, barrier = scratch
        batch_index, at_rows, column = lax.axis_index("batch"), _tile("rows", ROWS), lax.axis_index("columns")
        at_columns = pl.ds(column * COLUMNS, COLUMNS)
        plgpu.copy_gmem_to_smem(centroids_ref.at[batch_index, :, :, at_columns], centroid_smem, barrier)

        def fetch(row, _):
            chosen = index_ref[batch_index, lax.axis_index("rows") * ROWS + row]
            for ref, smem in ((codes_ref, byte_smem), (scales_ref, scale_smem), (packet_ref, packet_smem)):
                pieces, width = smem.shape[1], ref.shape[3]
                here = ref.at[batch_index, chosen, pl.ds(column * pieces, pieces)]
                plgpu.copy_gmem_to_smem(here, smem.at[row, :, pl.ds(0, width)], barrier)
            return _

        lax.fori_loop(0, fetched, fetch, None)
        _, place = positions((ROWS, _CHUNK))
        code, byte = positions((_CHUNK, _CHUNK // 2))
        split_smem[...] = jnp.where(code >> 1 == byte, 1.0, 0.0).astype(jnp.bfloat16)
        kind = _load_labels(source_ref.at[batch_index, at_rows])
        plgpu.barrier_wait(barrier)
        _, scale_column = positions((ROWS, COLUMNS // _GROUP))
        scales = load(scale_smem.at[:, 0, pl.ds(0, COLUMNS // _GROUP)]).astype(jnp.int32)

        def treat(chunk, _):
            here = pl.ds(chunk * _CHUNK, _CHUNK)
            wide_smem[...] = load(byte_smem.at[:, chunk]).astype(jnp.int32).astype(jnp.float32).astype(jnp.bfloat16)
            plgpu.commit_smem()
            both = multiply(_CHUNK, (wide_smem, split_smem.transpose((1, 0)))).astype(jnp.int32)
            code = (both >> (4 * (place & 1))) & 15
            step = full((ROWS, _CHUNK), 0.0)
            for group in range(_CHUNK // _GROUP):
                this = scale_column == chunk * (_CHUNK // _GROUP) + group
                scale = jnp.sum(jnp.where(this, scales, 0), axis=1)
                step = jnp.where(place >> 4 == group, spread_rows(_decode(scale, 3, 4, 7), _CHUNK), step)
            rows = _decode(code, 1, 2, 1) * step + _centroid_of(centroid_smem, here, kind, clusters)
            packet_rows = load(packet_smem.at[:, chunk])
            out_smem[chunk] = jnp.where(kind < 0, packet_rows, rows.astype(packet_rows.dtype))
            return _

        lax.fori_loop(0, _CHUNKS, treat, None)
        plgpu.commit_smem()
        for chunk in range(_CHUNKS):
            here = pl.ds(column * COLUMNS + chunk * _CHUNK, _CHUNK)
            plgpu.copy_smem_to_gmem(out_smem.at[chunk], out_ref.at[batch_index, at_rows, here])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, count, size), packet.dtype),
        scratch_types=[
            [
                plgpu.SMEM((ROWS, _CHUNKS, _CHUNK // 2), jnp.uint8),
                plgpu.SMEM((ROWS, 1, 128), jnp.uint8),  # the copy engine writes to multiples of 128 bytes
                plgpu.SMEM((clusters, 1, COLUMNS), jnp.float32),
                plgpu.SMEM((ROWS, _CHUNKS, _CHUNK), packet.dtype),
                plgpu.SMEM((ROWS, _CHUNK // 2), jnp.bfloat16),
                plgpu.SMEM((_CHUNK, _CHUNK // 2), jnp.bfloat16),
                plgpu.SMEM((_CHUNKS, ROWS, _CHUNK), packet.dtype),
                plgpu.Barrier(num_arrivals=1 + 3 * fetched),
            ]
        ],
        grid=(batch, tiles, size // COLUMNS),
        grid_names=("batch", "rows", "columns"),
    )(
        codes.reshape(*codes.shape[:2], -1, _CHUNK // 2),
        scales.reshape(*codes.shape[:2], -1, COLUMNS // _GROUP),
        source,
        centroids[:, :, None],
        index,
        packet.reshape(*codes.shape[:2], -1, _CHUNK),
    )


def _tile(axis: str, length: int):
    return pl.ds(lax.axis_index(axis) * length, length)


def _load_labels(ref) -> jax.Array:
    return spread_rows(load(ref, PER_ROW), _CHUNK)


def _centroid_of(centroid_smem, here, label: jax.Array, clusters: int) -> jax.Array:
    chosen = spread_columns(load(centroid_smem.at[0, 0, here], PER_COLUMN))
    for cluster in range(1, clusters):
        chosen = jnp.where(
            label == cluster, spread_columns(load(centroid_smem.at[cluster, 0, here], PER_COLUMN)), chosen
        )
    return chosen


# As in small_floats, in the operations that Mosaic has.


def _encode_e4m3(x: jax.Array) -> jax.Array:
    magnitude = jnp.minimum(x, E4M3_LARGEST)
    binade = jnp.maximum(exponent(magnitude), -6)
    units = lax.round(magnitude * power(3 - binade), lax.RoundingMethod.TO_NEAREST_EVEN)
    return units.astype(jnp.int32) + 8 * (binade + 6)


def _encode_e2m1(x: jax.Array, step: jax.Array) -> jax.Array:
    magnitude = jnp.abs(x)
    codes = jnp.where(lax.bitcast_convert_type(x, jnp.int32) < 0, 8, 0)
    for code, boundary in enumerate(E2M1_BOUNDARIES):
        beyond = magnitude >= boundary * step if code % 2 else magnitude > boundary * step
        codes = codes + jnp.where(beyond, 1, 0)
    return jnp.where(step > 0, codes, 0)


def _decode(codes: jax.Array, mantissa: int, fields: int, bias: int) -> jax.Array:
    field = (codes >> mantissa) & ((1 << fields) - 1)
    significand = (codes & ((1 << mantissa) - 1)) + jnp.where(field > 0, 1 << mantissa, 0)
    value = significand.astype(jnp.float32) * power(jnp.maximum(field, 1) - (bias + mantissa))
    return jnp.where((codes >> (mantissa + fields)) & 1 == 1, -value, value)
