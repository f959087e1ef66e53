"""The plot of `polestar demo`: accuracy against tokens per forward, a labelled point per method."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from polestar_jax.analysis.labels import place_labels


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
    place_labels(figure, axes, points)
    figure.savefig(path)
