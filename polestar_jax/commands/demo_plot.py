"""The plot of `polestar demo`: accuracy against tokens per forward, a labelled point per method."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox, BboxBase

_PLACES = (
    # offset in points, horizontal and vertical alignment of the label; the first that is free is taken
    ((9, 6), "left", "bottom"),
    ((9, -6), "left", "top"),
    ((-9, 6), "right", "bottom"),
    ((-9, -6), "right", "top"),
    ((9, 18), "left", "bottom"),
    ((9, -18), "left", "top"),
    ((-9, 18), "right", "bottom"),
    ((-9, -18), "right", "top"),
)


def draw(rows: Sequence[dict[str, Any]], path: str, title: str) -> None:
    """Draws the rows of the demo's JSON into a file; the error bars are one binomial standard error.

    Raises:
      ValueError: the file's ending is no image format.
    """
    # A figure without pyplot needs no display and leaves the user's backend alone.
    figure = Figure(figsize=(6.4, 4.2), dpi=160, layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.color_sequences["tab10"]
    points = []
    for number, row in enumerate(rows):
        error = 100 * row["accuracy_error"]
        x, y, color = row["tpf"], 100 * row["accuracy"], colors[number % len(colors)]
        marker = "osD^v"[number // len(colors) % 5]
        axes.errorbar(x, y, yerr=error, fmt=marker, color=color, markersize=7, capsize=3, elinewidth=1.2, zorder=3)
        points.append((row["method"], x, y, color))
    axes.set_xlabel("tokens per forward (non-EOS)")
    axes.set_ylabel("accuracy (%) ± standard error")
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.18, y=0.25)
    _label(figure, axes, points)
    figure.savefig(path)


def _label(figure: Figure, axes: Any, points: Sequence[tuple[str, float, float, Any]]) -> None:
    """Names the points, each label where it covers neither another label nor a point."""
    figure.draw_without_rendering()
    centers = axes.transData.transform([(x, y) for _, x, y, _ in points])
    radius = figure.dpi / 12
    taken: list[BboxBase] = [Bbox([center - radius, center + radius]) for center in centers]
    for name, x, y, color in points:
        for offset, horizontal, vertical in _PLACES:
            label = axes.annotate(
                name,
                (x, y),
                xytext=offset,
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                color=color,
                fontsize=9.5,
            )
            box = label.get_window_extent()
            if not any(box.overlaps(other) for other in taken) or offset == _PLACES[-1][0]:
                taken.append(box)
                break
            label.remove()
