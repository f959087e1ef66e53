"""The options `--show` and `--delay`: the canvas filling in, in the terminal or in a picture."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from polestar_jax.commands.output import check_target

if TYPE_CHECKING:
    from polestar_jax.show import Frame, Stage

TERMINAL = "-"

_ENDINGS = (".gif", ".png")
_TERMINAL_DELAY, _GIF_DELAY = 0.2, 0.6


def add_show(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the options; `what` is shown."""
    parser.add_argument(
        "--show",
        nargs="?",
        const=TERMINAL,
        metavar="FILE",
        help=f"show {what}: every token in the colour of the reason why it was committed, live in the terminal, or as"
        " an animation (FILE.gif) or a still (FILE.png); needs a terminal or a FILE",
    )
    parser.add_argument(
        "--delay",
        type=_seconds,
        metavar="SECONDS",
        help=f"per forward, with --show (default: {_TERMINAL_DELAY} in the terminal, {_GIF_DELAY} in a GIF)",
    )


def check_show(arguments: argparse.Namespace, notes: Console) -> None:
    """Refuses what cannot be shown, before anything is decoded.

    Raises:
      ValueError: naming the option and what to write instead.
    """
    target = arguments.show
    if target is None:
        if arguments.delay is not None:
            raise ValueError("--delay is the time between the frames of --show; add --show")
    elif target == TERMINAL:
        if not notes.is_terminal:
            raise ValueError("--show needs a terminal, and stderr is none; name a file instead: --show decode.gif")
    else:
        if Path(target).suffix.lower() not in _ENDINGS:
            raise ValueError(f"--show {target} must end in {' or '.join(_ENDINGS)}")
        check_target("--show", target)


def terminal_delay(arguments: argparse.Namespace) -> float:
    """Seconds per forward in the terminal."""
    return _TERMINAL_DELAY if arguments.delay is None else arguments.delay


def write_show(
    arguments: argparse.Namespace, notes: Console, decodes: Sequence[tuple["Stage", Sequence["Frame"]]]
) -> None:
    """Writes the picture that was asked for; does nothing for the terminal."""
    target = arguments.show
    if target == TERMINAL:
        return
    from polestar_jax.show_figure import animate, draw

    *others, last = [stage.title for stage, _ in decodes]
    title = f"The same prompt decoded by {', '.join(others)} and {last}" if others else f"{last} decodes a prompt"
    with notes.status(f"drawing {target}"):
        if Path(target).suffix.lower() == ".gif":
            delay = _GIF_DELAY if arguments.delay is None else arguments.delay
            animate(decodes, target, f"{title}, forward by forward", delay)
        else:
            draw(decodes, target, title)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 60")
    return value
