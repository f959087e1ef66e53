"""Spherical k-means of a window in plain NumPy, written from the paper's section 4.1 and design.md section 5."""

import numpy as np

SAME = 4e-6  # cosines this close count as equal


def shares(prefix, suffix, clusters, release=False):
    """How many clusters each region gets."""
    if prefix and suffix:
        share = min(max(clusters * prefix // (prefix + suffix), 1), clusters - 1)
        return share, clusters - share
    if suffix:
        return 0, clusters
    return (clusters - 1 if release else clusters) if prefix else 0, 0


def region_means(points, k, iterations, start, redraw, epsilon):
    """Labels and centroids of one region; `start` and `redraw` are ranks, -1 for none."""
    n = len(points)
    if n <= k:
        return np.arange(n), np.array([points[i % n] for i in range(k)])
    evenly = [int((i + 0.5) * n / k) for i in range(k)]
    centroids = np.array([points[s if s >= 0 else e] for s, e in zip(start, evenly, strict=False)])
    for iteration in range(iterations):
        labels = np.zeros(n, int)
        for row, point in enumerate(points):
            cosines = [point @ c / max(np.linalg.norm(point), 1e-12) / max(np.linalg.norm(c), 1e-12) for c in centroids]
            labels[row] = next(i for i, c in enumerate(cosines) if c >= max(cosines) - SAME)
        for i in range(k):
            members = points[labels == i]
            if len(members):
                centroids[i] = members.sum(axis=0) / (len(members) + epsilon)
            elif redraw[iteration][i] >= 0:
                centroids[i] = points[redraw[iteration][i]]
    return labels, centroids


def kmeans(rows, region, clusters, iterations, start=None, redraw=None, release=False, epsilon=0.0):
    """Labels, centroids and counts of a window; rows with region 0 are its prefix, with 1 its suffix."""
    rows = np.asarray(rows, np.float64)
    start = -np.ones((2, clusters), int) if start is None else start
    redraw = -np.ones((2, iterations, clusters), int) if redraw is None else redraw
    labels = -np.ones(len(rows), int)
    centroids = np.zeros((clusters, rows.shape[1]))
    first = 0
    sizes = [int(np.sum(region == r)) for r in (0, 1)]
    for r, k in enumerate(shares(*sizes, clusters, release)):
        if k:
            found, means = region_means(rows[region == r], k, iterations, start[r], redraw[r], epsilon)
            labels[region == r] = first + found
            centroids[first : first + k] = means
        first += k
    counts = np.array([np.sum(labels == i) for i in range(clusters)])
    return labels, centroids, counts
