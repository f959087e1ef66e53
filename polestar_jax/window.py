"""The local window around the current block: its slots, its coded hidden states, and which of its clusters drifted.

Section 4.1 of the paper: for every layer the inputs of the window's rows are clustered at a block's entry, kept as
coded residuals, and stood in for by the centroids when drift is measured.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import residual_nvfp4
from pallas_kernels.drift_reference import DriftReference
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
      reference: attention of the centroids at the last refresh or entry, rows K.
    """

    codes: Codes
    anchors: jax.Array | None
    centroids: jax.Array
    labels: jax.Array
    counts: jax.Array
    reference: DriftReference


@pytree
class Windows:
    """The `LayerWindow` of every layer.

    What a plain step only passes on, and refreshes do not write in place, is one array for all layers: XLA copies it in
    every branch of the loop, and a copy per layer would be as many operations.

    Attributes:
      codes, scores: per layer; scores are those of `LayerWindow.reference`.
      anchors, centroids, labels, counts, log_sum: with an axis L after B.
    """

    codes: tuple[Codes, ...]
    scores: tuple[jax.Array, ...]
    anchors: jax.Array | None
    centroids: jax.Array
    labels: jax.Array
    counts: jax.Array
    log_sum: jax.Array

    def layer(self, index: int) -> LayerWindow:
        stacked = self.anchors, self.centroids, self.labels, self.counts, self.log_sum
        anchors, centroids, labels, counts, log_sum = jax.tree.map(lambda leaf: leaf[:, index], stacked)
        reference = DriftReference(self.scores[index], log_sum)
        return LayerWindow(self.codes[index], anchors, centroids, labels, counts, reference)


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
    kept: tuple[Codes, Bool[Array, "... W"]] | None = None,
) -> Codes:
    """Codes rows, as residuals to the anchors of their clusters if there are any.

    Args:
      kernels: implementation of `residual_nvfp4.quantize`, all of which yield the same codes.
      kept: older codes, which rows keep that did not change, and those that did; None codes every row.
    """
    if anchors is not None and format == "nvfp4" and not tensor_scale:
        flat = lambda leaf, axes=2: leaf.reshape(-1, *leaf.shape[-axes:])
        old = None if kept is None else (*map(flat, jax.tree.leaves(kept[0])), flat(kept[1], 1))
        coded = residual_nvfp4.quantize(flat(rows), flat(labels, 1), flat(anchors), old, implementation=kernels)
        return Codes(*(leaf.reshape(*rows.shape[:-1], -1) for leaf in coded))
    if anchors is not None:
        rows = rows.astype(jnp.float32) - _anchor_of(anchors, labels)
    codes = quantize(rows, format, tensor_scale=tensor_scale)
    if kept is None:
        return codes
    old, changed = kept
    return jax.tree.map(lambda old, new: jnp.where(changed[..., None], new.astype(old.dtype), old), old, codes)


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


def rank_rows(labels: Int[Array, "B W"]) -> Int[Array, "B W"]:
    """How many rows of the same label come before each row."""
    earlier = iota(labels.shape[1]) < iota(labels.shape[1]).T
    same = labels[:, :, None] == labels[:, None, :]
    return (same & earlier[None]).sum(axis=2, dtype=jnp.int32)


def select_rows(
    drift: Float[Array, "B K"],
    counts: Int[Array, "B K"],
    labels: Int[Array, "B W"],
    rank: Int[Array, "B W"],
    selected: Float[Array, ""] | float,
    memberless: bool,
) -> tuple[Bool[Array, "B W"], Int[Array, "B W"]]:
    """The rows of the `selected` most drifted clusters, the lowest index first among equals.

    Drifts that only rounding tells apart are equal: clusters of [MASK] embeddings have the same centroid, and its drift
    in float32 must not decide.

    Args:
      counts: rows of each label; clusters without any do not compete.
      rank: of `rank_rows`.
      memberless: let them compete too, as the authors' release does; they refresh nothing.

    Returns:
      which rows; the place of each among them, cluster by cluster, which says nothing of the others.
    """
    eligible = jnp.ones_like(counts, bool) if memberless else counts > 0
    # The largest drift that each is equal to: the same number for all that are, hence an order.
    bound = drift + TIE * (1 + jnp.abs(drift))
    drift = jnp.where(eligible, drift, -jnp.inf)
    # Cluster by cluster, not as an axis to reduce over or look up in: XLA then makes no operations of their own of it.
    each = range(drift.shape[1])
    column = lambda plane: [plane[:, k : k + 1] for k in each]
    equal = (jnp.where(other <= bound, other, -jnp.inf) for other in column(drift))
    levels = column(jnp.where(eligible, functools.reduce(jnp.maximum, equal), -jnp.inf))
    own = functools.reduce(lambda own, k: jnp.where(labels == k, levels[k], own), each, -jnp.inf)
    ahead = [(levels[k] > own) | ((levels[k] == own) & (labels > k)) for k in each]
    add = lambda terms: functools.reduce(operator.add, terms)
    chosen = (own > -jnp.inf) & (add(one.astype(jnp.int32) for one in ahead) < selected)
    return chosen, rank + add(jnp.where(before, size, 0) for before, size in zip(ahead, column(counts), strict=True))
