"""Names beside the points of a plot, where they cover neither one another nor a point."""

import itertools
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox, BboxBase

_NEAR = ((7, 4), (7, 14))  # points, aside and up
_FAR = sorted(itertools.product((16, 32, 50, 70), (4, 14, 24, 36, 50, 66, 84)), key=lambda place: place[0] + place[1])
_DISTANCES = (*_NEAR, *_FAR)
_SIDES = (("left", "bottom"), ("left", "top"), ("right", "bottom"), ("right", "top"))


def place_labels(figure: Figure, axes: Any, points: Sequence[tuple[str, float, float, Any]], size: float = 9.5) -> None:
    """Names points `(name, x, y, color)`, in their order; a name that is far from its point gets a line to it.

    Call it when limits and scales are final: places are worked out on the page.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # a name must not move the axes any more
    page = axes.get_window_extent()
    radius = figure.dpi / 14
    centers = axes.transData.transform([(x, y) for _, x, y, _ in points])
    taken: list[BboxBase] = [Bbox([center - radius, center + radius]) for center in centers]
    for name, x, y, color in points:
        best: tuple[float, Any, BboxBase] | None = None
        for (far, (aside, up)), (horizontal, vertical) in itertools.product(enumerate(_DISTANCES), _SIDES):
            label = axes.annotate(
                name,
                (x, y),
                xytext=(aside if horizontal == "left" else -aside, up if vertical == "bottom" else -up),
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                color=color,
                fontsize=size,
                arrowprops={"arrowstyle": "-", "color": color, "lw": 0.5, "alpha": 0.6} if far >= len(_NEAR) else None,
                zorder=4,
            )
            label.get_window_extent()  # moves the text to its offset
            box = Text.get_window_extent(label)  # without the line
            hidden = sum(_common(box, other) for other in taken) + box.width * box.height - _common(box, page)
            if best is not None and hidden >= best[0]:
                label.remove()
                continue
            if best is not None:
                best[1].remove()
            best = hidden, label, box
            if hidden <= 0:
                break
        assert best is not None
        taken.append(best[2])


def _common(one: BboxBase, other: BboxBase) -> float:
    """The area that two boxes share."""
    both = Bbox.intersection(one, other)
    return 0.0 if both is None else both.width * both.height
