"""Repeats an ablation of the paper on the embedded checkpoint: accuracy and tokens per forward of every setting.

Sweeps: components, commit, selected, update, clusters, window, block, history, alpha, suffix, tau, format; drift, which
scores the signals that say what is stale against what truly is; or all.
Every setting is saved when it is done, and a sweep that was stopped goes on where it was.

examples:
  polestar sweep selected
  polestar sweep all --quick --out runs/sweeps
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polestar_jax.commands.options import add_model, add_seed
from polestar_jax.commands.output import make_consoles

if TYPE_CHECKING:
    from polestar_jax.evaluation.sweeps import Sweep

SUMMARY = "repeat the paper's ablations on the embedded checkpoint"
_QUICK = 50
_DRIFT = "drift"  # no list of methods: every policy looks at the same decodes
_DRIFT_TITLE = "Drift policies, the most stale quarter of the window (figure 6a)"

Remember = Callable[[str, Sequence[Any], Callable[[], Any]], Any]


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

    known = [*SWEEPS, _DRIFT]
    names = known if arguments.name == "all" else arguments.name.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown sweep {', '.join(unknown)}; there are {', '.join(known)}, and all")
    count = _QUICK if arguments.quick else arguments.items
    if count < 1:
        raise ValueError(f"--items {count} must be at least 1")
    with notes.status("loading"):
        from polestar_jax import load
        from polestar_jax.environment import describe_environment
        from polestar_jax.evaluation.answers import Answers, fingerprint, key_of

        model, params, tokenizer = load(arguments.model)

    folder = Path(arguments.out)
    done = Answers(folder / "points.jsonl")
    environment = describe_environment(dtype=model.config.dtype, command=arguments.words)
    measured = {name: environment[name] for name in ("date", "revision")}
    identity = [arguments.model, fingerprint(params), arguments.seed]

    def remember(what: str, key: Sequence[Any], measure: Callable[[], Any]) -> Any:
        """What was measured before under this key, and when, or what is measured now."""
        name = key_of(*identity, *key)
        if (found := done.get(name)) is None:
            with notes.status(what):
                found = measure() | {"measured": measured}
            done.add({name: found})
        return found

    settings = (model, params, tokenizer), count, arguments.seed, remember
    for name in names:
        title = _DRIFT_TITLE if name == _DRIFT else SWEEPS[name].title
        rows = _measure_policies(*settings) if name == _DRIFT else _measure_methods(SWEEPS[name], *settings)
        record = {
            "environment": environment,
            "sweep": name,
            "title": title,
            "model": arguments.model,
            "items": count,
            "rows": rows,
        }
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        _draw(record, folder / f"{name}.png")
        results.print(_table(record))


def _measure_methods(
    sweep: "Sweep", checkpoint: tuple[Any, Any, Any], count: int, seed: int, remember: Remember
) -> list[dict[str, Any]]:
    """A row per setting: accuracy and costs over the same items."""
    from models.embedded import tasks
    from models.embedded.checkpoint import BLOCK
    from polestar_jax.commands.method_arguments import describe_method, parse_method
    from polestar_jax.evaluation.measure_points import measure_method

    items, rows = tasks.make_items("heldout", count, seed), []
    for point in sweep.points:
        method = parse_method(point.method).build(int(BLOCK * point.blocks))
        measure = lambda method=method: measure_method(*checkpoint, method, items, tasks.ANSWER_LENGTH, seed)
        found = remember(f"{sweep.title}: {point.label}", [count, describe_method(method)], measure)
        rows.append({"label": point.label, "method": point.method, "default": point.default, **found})
    return rows


def _measure_policies(
    checkpoint: tuple[Any, Any, Any], count: int, seed: int, remember: Remember
) -> list[dict[str, Any]]:
    """A row per signal: the share of what is truly stale that it finds, over decodes that age the same way."""
    from models.embedded import tasks
    from models.embedded.checkpoint import BLOCK
    from polestar_jax.analysis.drift_study import POLICIES, count_found, share_found
    from polestar_jax.analysis.prompts import cached_method, pick_prompts
    from polestar_jax.analysis.trace import record_trace

    model, params, tokenizer = checkpoint
    method, counts = cached_method(BLOCK), []
    prompts = pick_prompts(tokenizer, count, seed)
    for number, prompt in enumerate(prompts):

        def measure(prompt: list[int] = prompt, number: int = number) -> dict[str, Any]:
            trace = record_trace(model, params, method, prompt, tasks.ANSWER_LENGTH, seed)
            return {"found": count_found(trace, seed=seed + number)}

        what = f"drift policies, prompt {number + 1} of {len(prompts)}"
        counts.append(remember(what, ["policies", repr(method), tasks.ANSWER_LENGTH, prompt, number], measure))
    found = [each["found"] for each in counts]
    return [
        {
            "label": name,
            "default": name == POLICIES[0],
            "accuracy": share,
            "accuracy_error": error if len(found) > 1 else None,
            "found": sum(each[name] for each in found),
            "of": sum(each["of"] for each in found),
            "measured": counts[-1]["measured"],
        }
        for name, (share, error) in share_found(found).items()
    ]


def _draw(record: dict[str, Any], path: Path) -> None:
    if record["sweep"] != _DRIFT:
        from polestar_jax.evaluation.sweep_plot import draw_sweep

        return draw_sweep(record, path)
    from polestar_jax.analysis.figures import draw_policies

    column = lambda name: {row["label"]: row[name] for row in record["rows"]}
    errors = column("accuracy_error") if record["items"] > 1 else None
    draw_policies(column("accuracy"), errors, f"{record['model']}, {record['items']} decodes").savefig(path)


def _table(record: dict[str, Any]) -> Any:
    from rich.table import Table

    costs = {
        "TPF": ("tpf", ".2f"),
        "forwards": ("forwards", ".2f"),
        "rows per forward": ("rows_per_forward", ".1f"),
        "refreshes": ("refreshes", ".2f"),
    }
    if record["sweep"] == _DRIFT:
        costs = {"found": ("found", "d"), "of": ("of", "d")}
    table = Table(
        "",
        "share" if record["sweep"] == _DRIFT else "accuracy",
        *costs,
        title=f"{record['title']}, {record['items']} items",
    )
    for row in record["rows"]:
        error = "" if row["accuracy_error"] is None else f" ±{100 * row['accuracy_error']:.1f}"
        table.add_row(
            row["label"] + (" *" if row["default"] else ""),
            f"{100 * row['accuracy']:.1f} %{error}",
            *(format(row[name], style) for name, style in costs.values()),
        )
    return table
