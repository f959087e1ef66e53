"""Decodes as pictures: an animation (GIF) or a still (PNG) of one method, or of several on the same prompt.

Left the canvas, a line of cells per block; right the same positions, from top to bottom, against the forwards: what
each computed and what it committed.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from PIL import Image

from polestar_jax.show import COLORS, Frame, Line, Stage, lay_out
from polestar_jax.types import NOTHING, Reason

_DPI = 100
_WIDTH = 10.2  # inches, as all lengths here
_CANVAS = 5.6
_LINE = 0.235
_HEADER = 0.4
_FOOTER = 0.78
_TITLE = 0.8
_COMPUTED = np.array(to_rgb("#c9c9c9"))
_FRAME = "#555555"
_INK, _FAINT = "#222222", "#8a8a8a"
_CELLS = 8  # in a line
_GUIDE = (
    "Left: the text as it fills in. Right: the same positions from top to bottom, and a column for every forward:"
    " what it computed, what it committed."
)
_MEANING = {
    Reason.CONFIDENCE: "confidence: sure enough",
    Reason.DRIFT: "drift: less sure, but its attention has just moved",
    Reason.FORCED: "forced: the surest of a block where none was ready",
    Reason.SUFFIX: "suffix: sure, and beyond the block",
    Reason.DEPENDENCY: "dependency: less sure, but what it attends to is known, or waits",
}

Decoded = tuple[Stage, Sequence[Frame]]


def animate(decodes: Sequence[Decoded], target: str | Path | BinaryIO, title: str, delay: float) -> None:
    """Writes a GIF that advances every decode by one forward at a time; those that are done wait for the others.

    It has a frame for the empty canvas, one for every forward of the longest decode, and one for the result.

    Args:
      decodes: stages with their frames, the empty canvas first.
      target: a path, or a file open for writing.
      title: a sentence above all.
      delay: seconds per forward.
    """
    scene = _Scene(decodes, title)
    images = [scene.draw(number) for number in range(max(len(frames) for _, frames in decodes) + 1)]
    durations = [round(1000 * delay)] * (len(images) - 1) + [round(1000 * max(6 * delay, 2.0))]
    images[0].save(target, format="GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)


def draw(decodes: Sequence[Decoded], target: str | Path | BinaryIO, title: str) -> None:
    """Writes a PNG of the finished decodes; see `animate`."""
    end = max(len(frames) for _, frames in decodes)
    _Scene(decodes, title, still=True).draw(end).save(target, format="PNG", optimize=True)


def animation(decodes: Sequence[Decoded], title: str, delay: float) -> bytes:
    """The GIF of `animate`, for a notebook."""
    buffer = io.BytesIO()
    animate(decodes, buffer, title, delay)
    return buffer.getvalue()


class _Scene:
    """A figure with a panel for each decode, drawn once and updated for every frame."""

    def __init__(self, decodes: Sequence[Decoded], title: str, still: bool = False):
        self.frames = [frames for _, frames in decodes]
        layouts = [lay_out(stage, _CELLS) for stage, _ in decodes]
        heights = [len(lines) * _LINE for lines in layouts]
        height = _TITLE + sum(heights) + _HEADER * len(heights) + _FOOTER
        self.figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
        self.canvas = FigureCanvasAgg(self.figure)
        forwards = max(len(frames) for frames in self.frames) - 1
        self.figure.text(0.01, 1 - 0.17 / height, title, fontsize=12, weight="bold", va="center", parse_math=False)
        self.figure.text(0.01, 1 - 0.39 / height, _GUIDE, fontsize=8.5, color=_FAINT, va="center")
        self.panels = []
        top = height - _TITLE
        for (stage, _), lines, tall in zip(decodes, layouts, heights, strict=True):
            place = lambda left, width, top=top, tall=tall: self.figure.add_axes(
                (left / _WIDTH, (top - tall) / height, width / _WIDTH, tall / height)
            )
            timeline = place(_CANVAS + 0.25, _WIDTH - _CANVAS - 0.45)
            self.panels.append(_Panel(stage, lines, place(0.1, _CANVAS), timeline, forwards))
            top -= tall + _HEADER
        self.panels[-1].name_axes()
        _add_legend(self.figure, still)

    def draw(self, number: int) -> Image.Image:
        """The picture when every decode has made `number` forwards, or all of its own."""
        for panel, frames in zip(self.panels, self.frames, strict=True):
            panel.update(frames[: number + 1], settled=number >= len(frames))
        self.canvas.draw()
        return Image.fromarray(np.asarray(self.canvas.buffer_rgba())[..., :3].copy())


class _Panel:
    """One decode: its canvas and its timeline."""

    def __init__(self, stage: Stage, lines: Sequence[Line], canvas: Axes, timeline: Axes, forwards: int):
        self.stage, self.timeline = stage, timeline
        per_line = max(len(line.slots) for line in lines)
        self.per_line = per_line
        self.place = {slot: (column, row) for row, line in enumerate(lines) for column, slot in enumerate(line.slots)}
        for axes in (canvas, timeline):
            axes.set_ylim(len(lines), 0)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0, labelsize=8, colors=_FAINT)
        canvas.set_xlim(-0.95, per_line)
        canvas.set(xticks=[], yticks=[])
        timeline.set_xlim(0.5, forwards + 0.5)
        timeline.set_yticks([])
        timeline.set_xticks([])
        self.labels = self._add_labels(canvas, lines)
        self.cells = {slot: self._add_cell(canvas, slot) for slot in self.place}
        self.picture = np.ones((len(lines) * per_line, forwards, 3))
        extent = (0.5, forwards + 0.5, len(lines), 0)
        self.image = timeline.imshow(self.picture, aspect="auto", interpolation="nearest", extent=extent)
        for axes in (canvas, timeline):
            for row in range(1, len(lines)):
                if lines[row].block != lines[row - 1].block:
                    axes.axhline(row, color="#bbbbbb" if lines[row - 1].block < 0 else "#eeeeee", linewidth=0.8)
        above = 1 + 0.05 / (len(lines) * _LINE)
        write = lambda axes, x, text, **style: axes.text(
            x, above, text, transform=axes.transAxes, va="bottom", fontsize=9.5, color=_INK, parse_math=False, **style
        )
        write(canvas, 0.0, stage.title, weight="bold")
        self.news = write(canvas, 1.0, "", ha="right")
        self.total = write(timeline, 0.0, "")

    def name_axes(self) -> None:
        """Says below the last panel what its timeline shows."""
        forwards = self.picture.shape[1]
        apart = 5 * -(-forwards // 75)
        self.timeline.set_xticks([1, *range(apart, forwards + 1, apart)])
        self.timeline.set_xlabel("forward →", fontsize=8.5, color=_FAINT, labelpad=1)

    def _add_labels(self, canvas: Axes, lines: Sequence[Line]) -> dict[int, Text]:
        """A name beside the first line of every block."""
        labels = {}
        for row, line in enumerate(lines):
            if line.block not in labels:
                name = "prompt" if line.block < 0 else f"block {line.block + 1}"
                labels[line.block] = canvas.text(-0.1, row + 0.5, name, ha="right", va="center", fontsize=8.5)
        return labels

    def _add_cell(self, canvas: Axes, slot: int) -> tuple[Rectangle, Text]:
        column, row = self.place[slot]
        box = Rectangle((column + 0.03, row + 0.07), 0.94, 0.86, linewidth=0)
        canvas.add_patch(box)
        word = canvas.text(
            column + 0.5, row + 0.52, "", ha="center", va="center", fontsize=8.5, family="monospace", parse_math=False
        )
        return box, word

    def update(self, frames: Sequence[Frame], settled: bool) -> None:
        """Shows the last of the frames so far; one that is `settled` does not say what its own forward did."""
        frame = frames[-1]
        for slot, (box, word) in self.cells.items():
            self._paint(frame, slot, box, word, settled)
        for block, label in self.labels.items():
            current = block == frame.block and not settled
            label.set(color=_INK if current else _FAINT, weight="bold" if current else "normal")
        self.picture[:] = 1
        for past in frames[1:]:
            self._add_column(past)
        self.image.set_data(self.picture)
        count, whole = frame.committed, self.stage.gen_length
        kind = f" ({frame.kind})" if frame.kind else ""
        running = f"forward {frame.forward}{kind}: {count} of {whole} tokens"
        self.news.set_text(f"done: {whole} tokens in {frame.forward} forwards" if count == whole else running)
        self.total.set_text(f"{frame.total:.0f} positions computed {'in all' if count == whole else 'so far'}")

    def _paint(self, frame: Frame, slot: int, box: Rectangle, word: Text, settled: bool) -> None:
        position = slot - len(self.stage.prompt)
        outside = position < 0 or position // self.stage.block_length != frame.block
        box.set(edgecolor=_FRAME, linewidth=0.9 if frame.computed[slot] and outside and not settled else 0)
        if position < 0:
            box.set_facecolor("#f4f4f4")
            word.set(text=_fit(self.stage.prompt[slot]), color=_FAINT)
        elif frame.token[position] == NOTHING:
            box.set_facecolor("#fafafa")
            word.set(text="·", color=_FAINT, weight="normal")
        else:
            new = frame.new[position] and not settled
            color = np.array(to_rgb(COLORS[Reason(frame.reason[position])]))
            box.set_facecolor(tuple(color if new else 0.45 * color + 0.55))
            text = self.stage.text(int(frame.token[position]))
            word.set(text=_fit(text), color=_INK, weight="bold" if new else "normal")

    def _add_column(self, frame: Frame) -> None:
        """What one forward computed, darker where more of the layers did, and what it committed."""
        for slot, (column, row) in self.place.items():
            position, y = slot - len(self.stage.prompt), row * self.per_line + column
            if position >= 0 and frame.new[position]:
                self.picture[y, frame.forward - 1] = to_rgb(COLORS[Reason(frame.reason[position])])
            elif share := frame.computed[slot]:
                self.picture[y, frame.forward - 1] = 1 - (0.25 + 0.75 * share) * (1 - _COMPUTED)


def _fit(word: str) -> str:
    return word if len(word) <= _CELLS else f"{word[: _CELLS - 1]}…"


def _add_legend(figure: Figure, still: bool) -> None:
    patches = [Patch(color=color, label=_MEANING[reason]) for reason, color in COLORS.items()]
    patches.append(Patch(color=tuple(_COMPUTED), label="computed by a forward; paler: in some of the layers"))
    if not still:
        patches.append(Patch(facecolor="white", edgecolor=_FRAME, label="computed by this forward outside its block"))
    figure.legend(handles=patches, loc="lower left", ncols=2, fontsize=8.5, frameon=False, bbox_to_anchor=(0.01, 0))
