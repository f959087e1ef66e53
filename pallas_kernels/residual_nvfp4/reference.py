"""Residual NVFP4 in jnp: the definition that the kernels reproduce bit by bit."""

import jax
import jax.numpy as jnp

from pallas_kernels.small_floats import (
    E2M1_LARGEST,
    decode_e2m1,
    decode_e4m3,
    divide,
    encode_e2m1,
    encode_e4m3,
    pack,
    unpack,
)

GROUP = 16


def quantize(rows: jax.Array, labels: jax.Array, centroids: jax.Array, kept=None) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.residual_nvfp4.quantize`."""
    residual = rows.astype(jnp.float32) - _centroid_of(centroids, labels)
    blocks = residual.reshape(*rows.shape[:-1], -1, GROUP)
    scales = encode_e4m3(divide(jnp.max(jnp.abs(blocks), axis=-1), E2M1_LARGEST)).astype(jnp.uint8)
    codes = encode_e2m1(blocks, decode_e4m3(scales)[..., None]).astype(jnp.uint8)
    codes = pack(codes.reshape(rows.shape), 4)
    if kept is None:
        return codes, scales
    old_codes, old_scales, changed = kept
    return jnp.where(changed[..., None], codes, old_codes), jnp.where(changed[..., None], scales, old_scales)


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
    take = lambda plane: jnp.take_along_axis(plane, index[..., None], axis=1, mode="clip")
    label = jnp.take_along_axis(labels, index, axis=1, mode="clip")
    changed = jnp.take_along_axis(changed, index, axis=1, mode="clip")
    levels = decode_e2m1(unpack(take(codes), 4))
    step = decode_e4m3(take(scales))
    residual = (levels.reshape(*step.shape, GROUP) * step[..., None]).reshape(levels.shape)
    rows = residual + _centroid_of(centroids, label)
    return jnp.where(changed[..., None], take(packet).astype(jnp.float32), rows).astype(packet.dtype)


def _centroid_of(centroids: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(centroids, jnp.maximum(labels, 0)[..., None], axis=-2)
