"""Spherical k-means of the local window: the centroids that stand in for its rows (paper section 4.1, algorithm 1).

Everything here treats one window of one layer; callers `vmap` over layers and batch rows. Prefix clusters are numbered
from 0, suffix clusters follow them, unused numbers come last.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from polestar_jax.types import pytree

OUTSIDE, PREFIX, SUFFIX = -1, 0, 1
"""Values of `region`."""

TIE = 4e-6
"""Cosines closer than this are tied. Equal rows are common (a suffix of [MASK] embeddings), and their float32 cosines
differ in the last bits, by up to 8e-7 at D = 4096: without a margin rounding would pick the cluster."""


@pytree
class Clusters:
    """A clustered window.

    Attributes:
      labels: int32 `[W]`, the cluster of each row, -1 outside the window.
      centroids: float32 `[K, D]`.
      counts: int32 `[K]`, rows per cluster.
    """

    labels: jax.Array
    centroids: jax.Array
    counts: jax.Array


@pytree
class Draws:
    """Random choices of the `release` preset, as ranks of rows inside their region; -1 where nothing was drawn.

    The last axis counts the clusters of one region, so entries beyond the region's share of the clusters are not read.

    Attributes:
      start: int32 `[2, K]`, the start row of each cluster of each region; -1 starts as without draws.
      redraw: int32 `[2, T, K]`, the row that replaces a cluster left empty by iteration T; -1 keeps its centroid.
    """

    start: jax.Array
    redraw: jax.Array


def region_clusters(
    prefix: Int[Array, ""], suffix: Int[Array, ""], clusters: int, *, suffixless_keeps_all: bool = True
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Shares K clusters between the regions in proportion to their rows, at least one each.

    Args:
      prefix, suffix: rows of each region; an empty one gets no cluster and leaves all to the other.
      clusters: K.
      suffixless_keeps_all: whether a window without a suffix has K clusters (paper) or K - 1 (release).

    Returns:
      int32 clusters of the prefix and of the suffix.

    Raises:
      ValueError: if K < 2, which cannot serve two regions.
    """
    if clusters < 2:
        raise ValueError(f"{clusters=} must be at least 2: one for the prefix and one for the suffix of the window")
    share = jnp.clip(clusters * prefix // jnp.maximum(prefix + suffix, 1), 1, clusters - 1)
    share = jnp.where(suffix == 0, clusters if suffixless_keeps_all else clusters - 1, share)
    share = jnp.where(prefix == 0, 0, share)
    return share.astype(jnp.int32), jnp.where(suffix == 0, 0, clusters - share).astype(jnp.int32)


def sample_draws(key: jax.Array, region: Int[Array, " W"], clusters: int, iterations: int) -> Draws:
    """Draws for `spherical_kmeans`: start rows without replacement, replacements uniformly.

    They depend on `key` and on how many rows each region has, not on where in the window these lie nor on its width.
    """
    start_key, redraw_key = jax.random.split(key)
    size = jnp.stack([jnp.sum(region == PREFIX), jnp.sum(region == SUFFIX)])[:, None]
    slots = max(region.shape[0], clusters)
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    tickets = fold(jax.random.split(start_key, 2), jnp.arange(slots, dtype=jnp.int32))
    lottery = jnp.where(jnp.arange(slots)[None, :] < size, jax.vmap(jax.vmap(jax.random.uniform))(tickets), jnp.inf)
    start = jnp.argsort(lottery, axis=1)[:, :clusters]
    start = jnp.where(jnp.arange(clusters)[None, :] < size, start, -1)
    redraw = jax.random.randint(redraw_key, (2, iterations, clusters), 0, jnp.maximum(size, 1)[..., None])
    return Draws(start.astype(jnp.int32), redraw)


def spherical_kmeans(
    rows: Float[Array, "W D"],
    region: Int[Array, " W"],
    clusters: int,
    iterations: int,
    *,
    suffixless_keeps_all: bool = True,
    epsilon: float = 0.0,
    draws: Draws | None = None,
) -> Clusters:
    """Clusters the rows of each region by cosine; a centroid is the plain mean of its members (SphericalKMeans).

    Without draws (paper preset) the k clusters of a region of n rows start at the rows of rank floor((i + 0.5) n / k),
    and an empty cluster keeps its centroid. A row goes to the nearest centroid, the lowest index if tied. A region with
    no more rows than clusters is not iterated: row r is cluster r, and the clusters beyond repeat the rows, memberless.
    Labels are those that the last means were taken over, so a centroid is the mean of exactly its labelled rows.

    Args:
      rows: hidden states, clustered in float32 whatever their dtype; rows outside the window have no influence.
      region: PREFIX, SUFFIX or OUTSIDE per row.
      clusters: K.
      iterations: T, of assignment and mean.
      suffixless_keeps_all: see `region_clusters`; false in the release preset.
      epsilon: added to the member counts that divide the sums; 1e-6 in the release preset.
      draws: start rows and replacements of empty clusters (release preset).

    Raises:
      ValueError: if K < 2 or T < 1.
    """
    if iterations < 1:
        raise ValueError(f"{iterations=} must be at least 1")
    rows = jnp.where((region >= 0)[:, None], rows.astype(jnp.float32), 0.0)
    in_region = region[None, :] == jnp.arange(2)[:, None]
    size = jnp.sum(in_region, axis=1, dtype=jnp.int32)
    rank = jnp.cumsum(in_region, axis=1, dtype=jnp.int32) - 1
    rank = jnp.where(region == SUFFIX, rank[SUFFIX], rank[PREFIX])
    share = jnp.stack(region_clusters(size[0], size[1], clusters, suffixless_keeps_all=suffixless_keeps_all))

    # Per cluster: its region, its place inside the region, and the rows and clusters that the region has.
    index = jnp.arange(clusters, dtype=jnp.int32)
    side = (index >= share[PREFIX]).astype(jnp.int32)
    place = index - side * share[PREFIX]
    n, k = size[side], jnp.maximum(share[side], 1)
    own = (index < jnp.sum(share))[:, None] & (side[:, None] == region[None, :])
    settled = n <= k

    def pick(target: Int[Array, " K"]) -> Bool[Array, "K W"]:
        """The row of rank `target` in each cluster's region; none for -1."""
        return own & (target[:, None] == rank[None, :])

    def total(chosen: Bool[Array, "K W"]) -> Float[Array, "K D"]:
        return jnp.matmul(chosen.astype(jnp.float32), rows, precision=jax.lax.Precision.HIGHEST)

    start = jnp.where(settled, place % jnp.maximum(n, 1), (2 * place + 1) * n // (2 * k))
    redraw = jnp.full((iterations, clusters), -1, jnp.int32)
    if draws is not None:
        drawn = draws.start[side, place]
        start = jnp.where(settled | (drawn < 0), start, drawn)
        redraw = draws.redraw[side, :, place].T
    scale = _inverse_length(rows)

    def iterate(carry, redraw):
        centroids, _ = carry
        product = jnp.matmul(centroids, rows.T, precision=jax.lax.Precision.HIGHEST)
        cosine = jnp.where(own, product * _inverse_length(centroids)[:, None] * scale[None, :], -jnp.inf)
        nearest = jnp.argmax(cosine >= jnp.max(cosine, axis=0, keepdims=True) - TIE, axis=0)
        members = jnp.where(settled[:, None], pick(place), own & (index[:, None] == nearest[None, :]))
        count = jnp.sum(members, axis=1, dtype=jnp.int32)
        empty = count == 0
        sums = total(jnp.where(empty[:, None], pick(redraw), members))
        moved = sums / jnp.where(empty, 1.0, count.astype(jnp.float32) + epsilon)[:, None]
        keep = settled | (empty & (redraw < 0))
        return (jnp.where(keep[:, None], centroids, moved), members), None

    carry = total(pick(start)), jnp.zeros_like(own)
    (centroids, members), _ = jax.lax.scan(iterate, carry, redraw)
    labels = jnp.where(jnp.any(members, axis=0), jnp.argmax(members, axis=0), -1).astype(jnp.int32)
    return Clusters(labels, centroids, jnp.sum(members, axis=1, dtype=jnp.int32))


def move_centroids(
    centroids: Float[Array, "K D"],
    counts: Int[Array, " K"],
    labels: Int[Array, " W"],
    old_rows: Float[Array, "W D"],
    new_rows: Float[Array, "W D"],
    changed: Bool[Array, " W"],
    *,
    epsilon: float = 0.0,
) -> Float[Array, "K D"]:
    """Keeps centroids the means of their members when some rows change; labels stay (section 4.1, algorithm 1's Patch).

    Args:
      centroids: float32, before the change.
      counts: members of each cluster; memberless clusters do not move.
      labels: the cluster of each row, -1 outside the window.
      old_rows, new_rows: rows before and after, read where `changed`.
      changed: rows that an update packet replaced.
      epsilon: added to the counts; 1e-6 in the release preset.
    """
    step = new_rows.astype(jnp.float32) - old_rows.astype(jnp.float32)
    step = jnp.where(changed[:, None], step, 0.0)
    members = labels[None, :] == jnp.arange(counts.shape[0])[:, None]
    sums = jnp.sum(jnp.where(members[..., None], step[None], 0.0), axis=1)
    return centroids + sums / jnp.where(counts > 0, counts.astype(jnp.float32) + epsilon, jnp.inf)[:, None]


def _inverse_length(rows: Float[Array, "R D"]) -> Float[Array, " R"]:
    """Finite for zero rows too, which are thus equally near to every centroid."""
    return 1 / jnp.maximum(jnp.linalg.norm(rows, axis=-1), 1e-12)
