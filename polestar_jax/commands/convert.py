"""Converts a downloaded Hugging Face folder to an Orbax folder that --model reads, or back.

Everything is checked before the first weight is read; weights pass through memory one tensor at a time; DST appears
whole, in one rename, or not at all. Tokenizer files go along.

examples:
  polestar convert LLaDA-8B-Instruct llada-8b
  polestar convert LLaDA-8B-Instruct llada-8b --resume         after a kill
  polestar convert llada-8b LLaDA-8B-copy --to hf --dtype float32
"""

import argparse
import collections
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from polestar_jax.commands.output import STDOUT, check_target, make_consoles, write_json

if TYPE_CHECKING:
    from convert.source import Source

SUMMARY = "convert a checkpoint folder between Hugging Face and Orbax"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a Hugging Face folder (or an Orbax folder)")
    parser.add_argument("target", metavar="DST", help="the folder to make")
    parser.add_argument("--to", choices=("orbax", "hf"), default="orbax", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights (default: as in SRC)")
    parser.add_argument("--resume", action="store_true", help="continue a conversion that was killed")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is there")
    parser.add_argument(
        "--report", metavar="FILE|-", help="write every tensor's name, shape, dtype and target as JSON, as in DST"
    )


def run(arguments: argparse.Namespace) -> None:
    check_target("--report", arguments.report)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # weights pass through host memory only
    from polestar_jax.loading import import_ours

    convert = import_ours("convert").convert
    results, notes = make_consoles(arguments.report)
    begun = time.perf_counter()
    with _progress_bar(notes) as (started, progress):
        try:
            report = convert(
                arguments.source,
                arguments.target,
                to=arguments.to,
                dtype=arguments.dtype,
                resume=arguments.resume,
                overwrite=arguments.overwrite,
                started=started,
                progress=progress,
            )
        except KeyboardInterrupt:
            notes.print(f"polestar: what is done of {arguments.target} is kept: go on with --resume", soft_wrap=True)
            raise
    seconds = time.perf_counter() - begun
    if arguments.report != STDOUT:
        for line in _lines(report):
            results.print(line, markup=False, soft_wrap=True, style="dim")
        results.print(
            f"{arguments.target}: {len(report['tensors'])} tensors, {report['bytes'] / 1e9:.3f} GB of"
            f" {report['dtype']} in {seconds:.1f} s, named as {report['naming']}",
            markup=False,
            soft_wrap=True,
        )
        for name, reason in report["ignored"].items():
            results.print(f"left out: {name}, {reason}", markup=False, soft_wrap=True)
    write_json(arguments.report, report)


@contextmanager
def _progress_bar(notes: Console) -> Iterator[tuple[Callable[["Source"], None], Callable[[str, int], None]]]:
    """What to call with the checked source, and with every tensor that is done."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    hidden = not notes.is_terminal
    text = TextColumn("{task.description}")
    with Progress(text, *columns, console=notes, transient=True, disable=hidden) as bar:
        task = bar.add_task("checking", total=None)

        def started(source: "Source") -> None:
            bar.update(task, total=sum(map(source.size, source.leaves)))

        def progress(path: str, size: int) -> None:
            bar.update(task, description=path, advance=size)

        yield started, progress


def _lines(report: dict[str, Any]) -> list[str]:
    """A line for every kind of tensor: layers that have the same shapes share one."""
    rows = collections.Counter(
        (
            *(re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor[key]) for key in ("name", "target")),
            " x ".join(map(str, tensor["shape"])),
            " to ".join(dict.fromkeys((tensor["dtype"], tensor["target_dtype"]))),
        )
        for tensor in report["tensors"]
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    name, target, shape, dtype = widths
    return [
        f"{count:4} x {row[0]:{name}} -> {row[1]:{target}}  {row[2]:{shape}}  {row[3]:{dtype}}"
        for row, count in rows.items()
    ]
