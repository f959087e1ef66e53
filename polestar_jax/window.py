"""The local window around the current block: its slots, its coded hidden states, and which of its clusters drifted.

Section 4.1 of the paper: for every layer the inputs of the window's rows are clustered at a block's entry, kept as
coded residuals, and stood in for by the centroids when drift is measured.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import residual_nvfp4
from pallas_kernels.implementation import Implementation
from polestar_jax.cluster import OUTSIDE, PREFIX, SUFFIX, TIE, move_centroids
from polestar_jax.quantize import Codes, Format, dequantize, quantize
from polestar_jax.rows import iota, take_rows
from polestar_jax.types import Canvas, Scope, Spec, pytree


@pytree
class LayerWindow:
    """The window's rows as one layer's inputs.

    Attributes:
      codes: leaves `[B, W, ...]`: coded residuals to the anchors, or coded rows.
      anchors: float32 `[B, K, D]`, the entry's centroids, which the codes stay relative to; None if they are not used.
      centroids: float32 `[B, K, D]`, moving with their members.
      labels: int32 `[B, W]`, -1 outside the window.
      counts: int32 `[B, K]`.
      reference: float32 `[B, h, K, N]`, log attention of the centroids at the last refresh or entry.
    """

    codes: Codes
    anchors: jax.Array | None
    centroids: jax.Array
    labels: jax.Array
    counts: jax.Array
    reference: jax.Array


def window_slots(
    spec: Spec, canvas: Canvas, scope: Scope, prefix: int, suffix: int
) -> tuple[Int[Array, "B W"], Int[Array, "B W"]]:
    """The window's slots, `prefix` of them before the block's rows and `suffix` after, and the region of each.

    Returns:
      slots, and PREFIX, SUFFIX or OUTSIDE (pads, beyond the canvas).
    """
    # With shifted logits the row before the block is one of the block's own.
    before = scope.start[:, None] - spec.model.shift - prefix + iota(prefix)
    after = scope.stop[:, None] + iota(suffix)
    slot = jnp.concatenate([before, after], axis=1)
    inside = (slot >= 0) & (slot < spec.length) & take_rows(canvas.valid, slot)
    return slot, jnp.where(inside, jnp.where(iota(prefix + suffix) < prefix, PREFIX, SUFFIX), OUTSIDE)


def encode(
    rows: Float[Array, "... W D"],
    anchors: Float[Array, "... K D"] | None,
    labels: Int[Array, "... W"],
    format: Format,
    tensor_scale: bool,
    kernels: Implementation | None = None,
) -> Codes:
    """Codes rows, as residuals to the anchors of their clusters if there are any.

    Args:
      kernels: implementation of `residual_nvfp4.quantize`, all of which yield the same codes.
    """
    if anchors is not None and format == "nvfp4" and not tensor_scale:
        flat = [x.reshape(-1, *x.shape[axis:]) for x, axis in ((rows, -2), (labels, -1), (anchors, -2))]
        codes = residual_nvfp4.quantize(*flat, implementation=kernels)
        return Codes(*(leaf.reshape(*rows.shape[:-1], -1) for leaf in codes))
    if anchors is not None:
        rows = rows.astype(jnp.float32) - _anchor_of(anchors, labels)
    return quantize(rows, format, tensor_scale=tensor_scale)


def decode_rows(window: LayerWindow, format: Format) -> Float[Array, "B W D"]:
    """The window's rows, float32."""
    rows = dequantize(window.codes, format).astype(jnp.float32)
    return rows if window.anchors is None else rows + _anchor_of(window.anchors, window.labels)


def _anchor_of(anchors: Float[Array, "... K D"], labels: Int[Array, "... W"]) -> Float[Array, "... W D"]:
    return jnp.take_along_axis(anchors, jnp.maximum(labels, 0)[..., None], axis=-2)


def patch(
    window: LayerWindow,
    rows: Float[Array, "B W D"],
    packet: Float[Array, "B W D"],
    changed: Bool[Array, "B W"],
    epsilon: float,
) -> tuple[Float[Array, "B W D"], Float[Array, "B K D"]]:
    """The window's rows with those of an update packet in place, and the centroids moved by what changed."""
    patched = jnp.where(changed[..., None], packet.astype(jnp.float32), rows)
    move = jax.vmap(lambda *leaves: move_centroids(*leaves, epsilon=epsilon))
    return patched, move(window.centroids, window.counts, window.labels, rows, patched, changed)


def recode(
    window: LayerWindow,
    rows: Float[Array, "B W D"],
    changed: Bool[Array, "B W"],
    format: Format,
    tensor_scale: bool,
    kernels: Implementation | None = None,
) -> Codes:
    """The window's codes after `rows` replaced those that `changed`."""
    codes = encode(rows, window.anchors, window.labels, format, tensor_scale, kernels)
    pick = lambda old, new: jnp.where(changed[..., None], new.astype(old.dtype), old)
    return jax.tree.map(pick, window.codes, codes)


def select_clusters(
    drift: Float[Array, "B K"], counts: Int[Array, "B K"], selected: Float[Array, ""] | float, memberless: bool
) -> Bool[Array, "B K"]:
    """The `selected` most drifted clusters, the lowest index first among equals.

    Drifts that only rounding tells apart are equal: clusters of [MASK] embeddings have the same centroid, and its drift
    in float32 must not decide.

    Args:
      memberless: let clusters without members compete, as the authors' release does; they refresh nothing.
    """
    eligible = jnp.ones_like(counts, bool) if memberless else counts > 0
    # The largest drift that each is equal to: the same number for all that are, hence an order.
    equal = eligible[:, None, :] & (drift[:, None, :] <= (drift + TIE * (1 + jnp.abs(drift)))[:, :, None])
    level = jnp.max(jnp.where(equal, drift[:, None, :], -jnp.inf), axis=2)
    level = jnp.where(eligible, level, -jnp.inf)
    index = jnp.arange(drift.shape[1])
    earlier = (index[:, None] > index[None, :])[None]
    ahead = (level[:, None, :] > level[:, :, None]) | ((level[:, None, :] == level[:, :, None]) & earlier)
    return eligible & (ahead.sum(axis=2) < selected)


def members(chosen: Bool[Array, "B K"], labels: Int[Array, "B W"]) -> Bool[Array, "B W"]:
    """The rows of the chosen clusters."""
    return take_rows(chosen, jnp.maximum(labels, 0)) & (labels >= 0)
