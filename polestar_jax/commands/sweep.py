"""Repeats an ablation of the paper: accuracy and tokens per forward of every setting.

Sweeps: components, commit, selected, update, clusters, window, block, history, alpha, suffix, tau, format; drift, which
scores the signals that say what is stale against what truly is; or all. They run on exercises that the embedded
checkpoints know; with --task on a benchmark, asked with the options of `polestar eval`.
Every setting is saved when it is done, and a sweep that was stopped goes on where it was.

examples:
  polestar sweep selected
  polestar sweep all --quick --out runs/sweeps
  polestar sweep components,tau --task gsm8k --model path/to/LLaDA-8B-Instruct --chat single_user --gen-length 256 \\
      --block-length 32 --limit 200
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polestar_jax.commands.benchmark_options import add_benchmark, check_benchmark, check_programs
from polestar_jax.commands.options import add_model, add_seed
from polestar_jax.commands.output import make_consoles

if TYPE_CHECKING:
    from polestar_jax.commands.sweep_subject import Subject
    from polestar_jax.evaluation.sweeps import Sweep

SUMMARY = "repeat the paper's ablations"
_QUICK = 50
_DRIFT = "drift"  # no list of methods: every policy looks at the same decodes
_DRIFT_TITLE = "Drift policies, the most stale quarter of the window (figure 6a)"

Remember = Callable[[str, Sequence[Any], Callable[[], Any]], Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a sweep, several separated by commas, or all")
    parser.add_argument("--items", type=int, default=400, metavar="N", help="held-out items (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK} items: what changes by points is noise")
    parser.add_argument("--out", default="runs/sweeps", metavar="DIR", help="JSON and PNG (default: %(default)s)")
    add_model(parser, "an embedded checkpoint; with --task any")
    add_seed(parser, "of the items, and of methods that draw")
    parser.add_argument("--task", metavar="NAME", help="one task of `polestar eval`; the options below are for it")
    add_benchmark(parser, required=False)


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
    if arguments.task is not None:
        check_benchmark(arguments)
        if arguments.gen_length is None or arguments.block_length is None:
            raise ValueError(f"--task {arguments.task} needs --gen-length and --block-length")
    folder = Path(arguments.out)
    with notes.status("loading"):
        from polestar_jax import load
        from polestar_jax.commands.sweep_subject import take_benchmark, take_exercises
        from polestar_jax.environment import describe_environment
        from polestar_jax.evaluation.answers import Answers, fingerprint, key_of

        checkpoint = load(arguments.model, dtype=arguments.dtype)
        if arguments.task is None:
            subject = take_exercises(arguments, checkpoint, count)
        else:
            check_programs([arguments.task], False, notes)
            limit = arguments.limit or (_QUICK if arguments.quick else None)
            subject = take_benchmark(arguments, checkpoint, limit, folder)

    done = Answers(folder / "points.jsonl")
    environment = describe_environment(dtype=checkpoint[0].config.dtype, command=arguments.words)
    measured = {name: environment[name] for name in ("date", "revision")}
    identity = [arguments.model, fingerprint(checkpoint[1]), arguments.seed]

    def remember(what: str, key: Sequence[Any], measure: Callable[[], Any]) -> Any:
        """What was measured before under this key, and when, or what is measured now."""
        name = key_of(*identity, *key)
        if (found := done.get(name)) is None:
            with notes.status(what):
                found = measure() | {"measured": measured}
            done.add({name: found})
        return found

    for name in names:
        if name == _DRIFT:
            title, rows = _DRIFT_TITLE, _measure_policies(checkpoint, subject, arguments.seed, remember)
        else:
            title, rows = SWEEPS[name].title, _measure_methods(SWEEPS[name], subject, checkpoint[2], remember)
        record = {
            "environment": environment,
            "sweep": name,
            "title": title,
            "model": arguments.model,
            "subject": subject.name,
            "rows": rows,
        }
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        _draw(record, folder / f"{name}.png")
        results.print(_table(record))


def _measure_methods(sweep: "Sweep", subject: "Subject", tokenizer: Any, remember: Remember) -> list[dict[str, Any]]:
    """A row per setting: accuracy and costs."""
    from polestar_jax.commands.method_arguments import describe_method, parse_method

    rows = []
    for point in sweep.points:
        method = parse_method(point.method).build(int(subject.block_length * point.blocks), tokenizer)
        key = [*subject.key, describe_method(method)]
        found = remember(f"{sweep.title}: {point.label}", key, lambda method=method: subject.measure(method))
        rows.append({"label": point.label, "method": point.method, "default": point.default, **found})
    return rows


def _measure_policies(
    checkpoint: tuple[Any, Any, Any], subject: "Subject", seed: int, remember: Remember
) -> list[dict[str, Any]]:
    """A row per signal: the share of what is truly stale that it finds, over decodes that age the same way."""
    from polestar_jax.analysis.drift_study import POLICIES, count_found, share_found
    from polestar_jax.analysis.prompts import cached_method
    from polestar_jax.analysis.trace import record_trace

    method, prompts, found = cached_method(subject.block_length), subject.prompts(), []
    for number, prompt in enumerate(prompts):

        def measure(prompt: list[int] = prompt, number: int = number) -> dict[str, Any]:
            trace = record_trace(*checkpoint[:2], method, prompt, subject.gen_length, seed, whole_predictions=False)
            return {"found": count_found(trace, seed=seed + number)}

        key = ["policies", repr(method), subject.gen_length, prompt, number]
        found.append(remember(f"drift policies, prompt {number + 1} of {len(prompts)}", key, measure))
    counts = [each["found"] for each in found]
    return [
        {
            "label": name,
            "default": name == POLICIES[0],
            "accuracy": share,
            "accuracy_error": error if len(counts) > 1 else None,
            "found": sum(each[name] for each in counts),
            "of": sum(each["of"] for each in counts),
            "decodes": len(counts),
            "measured": found[-1]["measured"],
        }
        for name, (share, error) in share_found(counts).items()
    ]


def _draw(record: dict[str, Any], path: Path) -> None:
    if record["sweep"] != _DRIFT:
        from polestar_jax.evaluation.sweep_plot import draw_sweep

        return draw_sweep(record, path)
    from polestar_jax.analysis.figures import draw_policies

    rows = record["rows"]
    errors = None if rows[0]["accuracy_error"] is None else {row["label"]: row["accuracy_error"] for row in rows}
    title = f"{record['model']}, {rows[0]['decodes']} decodes"
    draw_policies({row["label"]: row["accuracy"] for row in rows}, errors, title).savefig(path)


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
    score = "share found" if record["sweep"] == _DRIFT else "accuracy"
    table = Table("", score, *costs, title=f"{record['title']}, {record['subject']}")
    for row in record["rows"]:
        error = "" if row["accuracy_error"] is None else f" ±{100 * row['accuracy_error']:.1f}"
        table.add_row(
            row["label"] + (" *" if row["default"] else ""),
            f"{100 * row['accuracy']:.1f} %{error}",
            *(format(row[name], style) for name, style in costs.values()),
        )
    return table
