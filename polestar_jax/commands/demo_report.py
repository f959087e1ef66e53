"""What `polestar demo` says about its runs: JSON rows, tables, sentences and the plot."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from polestar_jax.environment import format_environment
from polestar_jax.metrics import binomial_error, concatenate, paired_difference, summarize

if TYPE_CHECKING:
    from models.embedded.tasks import Item
    from polestar_jax.commands.demo_runs import Run

Row = dict[str, Any]


def make_row(run: "Run", items: Sequence["Item"]) -> Row:
    """The results of one method, for JSON."""
    correct = np.array(run.correct)
    names = np.array([item.task for item in items])
    metrics = concatenate(run.metrics)
    accuracy = float(correct.mean())
    return {
        "method": run.choice.label,
        "config": run.config,
        "accuracy": accuracy,
        "accuracy_error": binomial_error(accuracy, len(items)),
        "accuracy_by_task": {name: float(correct[names == name].mean()) for name in dict.fromkeys(names.tolist())},
        **summarize(metrics, run.seconds),
        "seconds": run.seconds,
        "forward_ms": 1000 * run.seconds / float(metrics.forwards.sum()),
    }


def print_report(
    console: Console, runs: Sequence["Run"], rows: Sequence[Row], environment: dict[str, Any], size: int
) -> None:
    """Prints the tables, and below them what they say and what they do not."""
    tasks = dict.fromkeys(name for row in rows for name in row["accuracy_by_task"])
    outcome = {
        "accuracy": lambda row: f"{row['accuracy']:.1%} ±{100 * row['accuracy_error']:.1f}",
        **{name: lambda row, name=name: f"{row['accuracy_by_task'][name]:.1%}" for name in tasks},
        "TPF": lambda row: f"{row['tpf']:.2f}",
        "positions\n/forward": lambda row: f"{row['positions_per_forward']:.2f}",
        "ms\n/forward": lambda row: f"{row['forward_ms']:.1f}",
        "TPS": lambda row: f"{row['tps']:.0f}",
    }
    work = {
        "forwards": lambda row: f"{row['forwards']:.1f}",
        "refreshes": lambda row: f"{row['refreshes']:.1f}",
        "rows\n/forward": lambda row: f"{row['rows']:.1f}",
        "executed\n/forward": lambda row: f"{row['rows_executed']:.1f}",
    }
    reasons = [reason for reason in rows[0]["commits"] if any(row["commits"][reason] for row in rows)]
    for number, reason in enumerate(reasons):
        work[f"{'' if number else 'commits by'}\n{reason}"] = lambda row, reason=reason: f"{row['commits'][reason]:.1f}"
    console.print(_table(f"Quality and speed over {len(runs[0].correct)} held-out items", rows, outcome))
    console.print()
    console.print(_table("Work per item", rows, work))
    console.print()
    for sentence in (compare(runs, rows), explain_speed(rows, environment, size)):
        if sentence:
            console.print(sentence, markup=False)
    console.print(format_environment(environment), markup=False, style="dim")


def _table(title: str, rows: Sequence[Row], columns: dict[str, Callable[[Row], str]]) -> Table:
    """A table that fits 80 characters."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=0
    )
    longest = max(len(part) for row in rows for part in row["method"].split(":"))
    table.add_column("method", overflow="fold", min_width=min(longest, 24))
    for header in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        # Settings go below the name, where they leave the numbers their room.
        table.add_row(row["method"].replace(":", "\n:"), *(value(row) for value in columns.values()))
    return table


def compare(runs: Sequence["Run"], rows: Sequence[Row]) -> str | None:
    """How Polestar's accuracy and TPF compare with parallel decoding's; None unless both ran."""
    first = {run.choice.name: number for number, run in reversed(list(enumerate(runs)))}
    if not {"polestar", "parallel"} <= first.keys():
        return None
    ours, theirs = rows[first["polestar"]], rows[first["parallel"]]
    right, right_theirs = (np.array(runs[first[name]].correct) for name in ("polestar", "parallel"))
    difference, error = paired_difference(right, right_theirs)
    ratio = f", a difference of {abs(difference) / error:.1f} standard errors" if error > 0 else ""
    only = (right & ~right_theirs).sum(), (right_theirs & ~right).sum()
    return (
        f"{ours['method']} against {theirs['method']} on the same {right.size} items: {100 * difference:+.2f} points of"
        f" accuracy (paired standard error {100 * error:.2f}){ratio}; right only with the first: {only[0]}, only with"
        f" the second: {only[1]}. TPF {ours['tpf']:.2f} against {theirs['tpf']:.2f}."
    )


def explain_speed(rows: Sequence[Row], environment: dict[str, Any], size: int) -> str:
    """What TPS means on a model of `size` parameters."""
    widest, narrowest = max(rows, key=lambda row: row["rows"]), min(rows, key=lambda row: row["rows"])
    comparison = ""
    if narrowest["rows"] < 0.9 * widest["rows"]:
        comparison = (
            f" A forward of {narrowest['method']} has {narrowest['rows'] / widest['rows']:.0%} of the rows of one of"
            f" {widest['method']} and takes {narrowest['forward_ms'] / widest['forward_ms']:.0%} of its time."
        )
    return (
        f"TPS is that of one request at a time, compilation excluded, on this {environment['device']}.{comparison}"
        f" A model of {size / 1e6:.1f} M parameters pays for the number of operations before it pays for rows, a large"
        " one for rows and for reading its weights: TPS does not carry over from here."
    )
