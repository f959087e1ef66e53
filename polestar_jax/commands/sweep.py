"""Repeats an ablation of the paper on the embedded checkpoint: accuracy and tokens per forward of every setting.

Sweeps: components, commit, selected, update, clusters, window, block, history, alpha, suffix, tau, format; or all.
Every setting is saved when it is done, and a sweep that was stopped goes on where it was.

examples:
  polestar sweep selected
  polestar sweep all --quick --out runs/sweeps
"""

import argparse
import json
from pathlib import Path
from typing import Any

from polestar_jax.commands.options import add_model, add_seed
from polestar_jax.commands.output import make_consoles

SUMMARY = "repeat the paper's ablations on the embedded checkpoint"
_QUICK = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a sweep, several separated by commas, or all")
    parser.add_argument("--items", type=int, default=400, metavar="N", help="held-out items (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK} items: what changes by points is noise")
    parser.add_argument("--out", default="runs/sweeps", metavar="DIR", help="JSON and PNG (default: %(default)s)")
    add_model(parser, "an embedded checkpoint")
    add_seed(parser, "of the items, and of methods that draw")


def run(arguments: argparse.Namespace) -> None:
    results, notes = make_consoles(None)
    from polestar_jax.evaluation.sweeps import SWEEPS

    names = list(SWEEPS) if arguments.name == "all" else arguments.name.split(",")
    if unknown := [name for name in names if name not in SWEEPS]:
        raise ValueError(f"unknown sweep {', '.join(unknown)}; there are {', '.join(SWEEPS)}, and all")
    count = _QUICK if arguments.quick else arguments.items
    if count < 1:
        raise ValueError(f"--items {count} must be at least 1")
    with notes.status("loading"):
        from polestar_jax import load
        from polestar_jax.commands.method_arguments import describe_method, parse_method
        from polestar_jax.environment import describe_environment
        from polestar_jax.evaluation.answers import Answers, key_of
        from polestar_jax.evaluation.measure_points import measure_method
        from polestar_jax.evaluation.sweep_plot import draw_sweep

        model, params, tokenizer = load(arguments.model)
        from models.embedded import tasks
        from models.embedded.checkpoint import BLOCK

    items = tasks.make_items("heldout", count, arguments.seed)
    folder = Path(arguments.out)
    done = Answers(folder / "points.jsonl")
    for name in names:
        sweep, rows = SWEEPS[name], []
        for point in sweep.points:
            method = parse_method(point.method).build(int(BLOCK * point.blocks))
            described = describe_method(method)
            key = key_of(arguments.model, count, arguments.seed, described)
            found: dict[str, Any] | None = done.get(key)
            if found is None:
                with notes.status(f"{name}: {point.label}"):
                    found = measure_method(model, params, tokenizer, method, items, tasks.ANSWER_LENGTH, arguments.seed)
                done.add({key: found})
            rows.append({"label": point.label, "method": point.method, "default": point.default, **found})
        record = {
            "environment": describe_environment(dtype=model.config.dtype, command=arguments.words),
            "sweep": name,
            "title": sweep.title,
            "model": arguments.model,
            "items": count,
            "rows": rows,
        }
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        draw_sweep(record, folder / f"{name}.png")
        results.print(_table(record))


def _table(record: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        "",
        "accuracy",
        "TPF",
        "forwards",
        "rows per forward",
        "refreshes",
        title=f"{record['title']}, {record['items']} items",
    )
    for row in record["rows"]:
        star = " *" if row["default"] else ""
        table.add_row(
            row["label"] + star,
            f"{100 * row['accuracy']:.1f} % ±{100 * row['accuracy_error']:.1f}",
            f"{row['tpf']:.2f}",
            f"{row['forwards']:.2f}",
            f"{row['rows_per_forward']:.1f}",
            f"{row['refreshes']:.2f}",
        )
    return table
