"""`--show` in the terminal: the canvas fills in, forward by forward."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from polestar_jax.show import COLORS, Frame, Line, Stage, lay_out
from polestar_jax.types import NOTHING, Reason

_CELL = 8  # columns of a token, with a space after it
_LABEL = 8
_OTHER_LINES = 7  # title, legend, counters, the cursor's line


@contextlib.contextmanager
def screen(stage: Stage, console: Console, delay: float) -> Iterator[Callable[[Frame], None]]:
    """Yields a function that shows a frame for at least `delay` seconds; the last one stays in the terminal."""
    with Live(console=console, auto_refresh=False) as live:

        def show(frame: Frame) -> None:
            live.update(render(stage, frame, console.width, console.height), refresh=True)
            time.sleep(delay)

        yield show


def render(stage: Stage, frame: Frame, width: int, height: int) -> Group:
    """One frame in `width` columns and `height` lines; a canvas that is longer is cut around the current block."""
    lines = lay_out(stage, max((width - _LABEL) // _CELL, 1))
    room = max(height - _OTHER_LINES, 1)
    current = next(number for number, line in enumerate(lines) if line.block == frame.block)
    top = min(max(current - room // 2, 0), max(len(lines) - room, 0))
    shown = range(top, min(top + room, len(lines)))
    return Group(
        _title(stage),
        *(
            _line(stage, frame, lines[number], starts=number == top or lines[number - 1].block != lines[number].block)
            for number in shown
        ),
        Text(),
        _legend(),
        *_counters(stage, frame),
    )


def _title(stage: Stage) -> Text:
    title = Text(f"{stage.title}", style="bold")
    title.append(f"  {stage.gen_length} tokens in blocks of {stage.block_length}", style="dim not bold")
    return title


def _line(stage: Stage, frame: Frame, line: Line, starts: bool) -> Text:
    """A line of cells, with its block's name where the block starts."""
    current = line.block == frame.block
    name = "" if not starts else "prompt" if line.block < 0 else f"{'▶' if current else ' '} {line.block + 1}"
    text = Text(name.ljust(_LABEL), no_wrap=True)
    text.stylize("bold" if current else "dim")
    for slot in line.slots:
        word, style = _cell(stage, frame, slot)
        if frame.computed[slot] and not current:
            style += " underline"
        text.append(_fit(word).ljust(_CELL - 1), style=style)
        text.append(" ")
    return text


def _cell(stage: Stage, frame: Frame, slot: int) -> tuple[str, str]:
    """What a slot shows, and how."""
    position = slot - len(stage.prompt)
    if position < 0:
        return stage.prompt[slot], "dim"
    token = int(frame.token[position])
    if token == NOTHING:
        return "·", "dim"
    color = COLORS[Reason(frame.reason[position])]
    return stage.text(token), f"bold black on {color}" if frame.new[position] else color


def _fit(word: str) -> str:
    return word if len(word) < _CELL else f"{word[: _CELL - 2]}…"


def _legend() -> Text:
    legend = Text("why: ")
    for reason, color in COLORS.items():
        legend.append(f" {reason.name.lower()} ", style=f"bold black on {color}")
        legend.append(" ")
    legend.append(" ")
    legend.append("recomputed", style="underline")
    legend.append(" beyond the block")
    return legend


def _counters(stage: Stage, frame: Frame) -> list[Text]:
    if not frame.forward:
        return [Text("before the first forward"), Text()]
    rate = frame.committed / frame.forward
    return [
        Text(
            f"forward {frame.forward} ({frame.kind}): {frame.committed} of {stage.gen_length} tokens,"
            f" {rate:.2f} per forward"
        ),
        Text(f"positions computed: {frame.rows:.1f} in this forward, {frame.total:.0f} so far"),
    ]
