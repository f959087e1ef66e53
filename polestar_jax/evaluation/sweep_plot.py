"""The plot of a sweep, in the paper's form: a bar of accuracy per setting, its TPF above, the default starred."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw_sweep(record: dict[str, Any], path: str | Path) -> None:
    """Draws the record of `polestar sweep`; the error bars are one binomial standard error."""
    rows = record["rows"]
    figure = Figure(figsize=(max(4.0, 0.85 * len(rows) + 1.2), 3.4), dpi=160, layout="constrained")
    axes = figure.subplots()
    heights = [100 * row["accuracy"] for row in rows]
    errors = [100 * row["accuracy_error"] for row in rows]
    colors = ["#1f4e79" if row["default"] else "#9db7d1" for row in rows]
    axes.bar(range(len(rows)), heights, yerr=errors, color=colors, width=0.7, capsize=2.5, error_kw={"elinewidth": 0.9})
    for place, row in enumerate(rows):
        star = "★\n" if row["default"] else ""
        top = heights[place] + errors[place]
        axes.annotate(
            f"{star}{row['tpf']:.2f}",
            (place, top),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8.5,
        )
    low, high = min(heights), max(heights)
    room = max(high - low, 2.0)
    axes.set_ylim(max(0.0, low - 0.9 * room - max(errors)), high + max(errors) + 0.55 * room)
    crowded = max(len(row["label"]) for row in rows) > 8 and len(rows) > 3
    axes.set_xticks(
        range(len(rows)),
        [row["label"] for row in rows],
        rotation=30 if crowded else 0,
        ha="right" if crowded else "center",
    )
    axes.tick_params(labelsize=8.5)
    axes.set_ylabel("accuracy (%)")
    axes.set_title(f"{record['title']}\n{record['model']}, {record['subject']}; TPF above", fontsize=9.5, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
