"""Draws the paper's figures on an embedded checkpoint, from traces of decodes with a full forward at every step.

3a cache error by drift, 3b progress, 3c trajectories, 4 drift heatmap, 6a drift policies, 8 drift by commits,
12 time per layer, 13 memory from the shapes of LLaDA-8B, 1 accuracy against speed (measured as `polestar demo` does, or
taken from its --json).

examples:
  polestar figures --quick
  polestar figures --methods all --out docs/figures
  polestar figures --front demo.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from polestar_jax.commands.options import add_model, add_seed
from polestar_jax.commands.output import make_consoles

SUMMARY = "draw the paper's figures on the embedded checkpoint"

# Those of the paper's figure 1 and tables that differ in what they reuse and how they commit.
_METHODS = "vanilla,parallel,fast_dllm,elastic_cache,d2cache,klass,dawn,polestar"
_FRONT_ITEMS = 10  # of figure 1, per traced prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--items", type=int, default=40, metavar="N", help="prompts to trace (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="4 prompts")
    parser.add_argument(
        "--methods",
        default=_METHODS,
        metavar="A,B,...",
        help=f"of figure 1, measured on {_FRONT_ITEMS} items per prompt; or all (default: %(default)s)",
    )
    parser.add_argument("--front", metavar="FILE", help="take figure 1 from results of `polestar demo --json FILE`")
    parser.add_argument("--out", default="runs/figures", metavar="DIR", help="PNG and JSON (default: %(default)s)")
    add_model(parser, "an embedded checkpoint")
    add_seed(parser, "of the items")


def run(arguments: argparse.Namespace) -> None:
    results, notes = make_consoles(None)
    count = 4 if arguments.quick else arguments.items
    if count < 1:
        raise ValueError(f"--items {count} must be at least 1")
    measured = None if arguments.front is None else _read_front(arguments.front)
    with notes.status("loading"):
        from polestar_jax import load, methods
        from polestar_jax.analysis import drift_study, figures
        from polestar_jax.analysis.costs import state_bytes, time_kinds
        from polestar_jax.analysis.parts import time_parts
        from polestar_jax.analysis.prompts import cached_method, pick_prompts
        from polestar_jax.analysis.trace import record_trace
        from polestar_jax.commands.demo_report import make_row
        from polestar_jax.commands.demo_runs import decode_items, prepare_runs
        from polestar_jax.commands.method_arguments import parse_methods
        from polestar_jax.environment import describe_environment

        choices = parse_methods(arguments.methods)
        model, params, tokenizer = load(arguments.model)
        from models.embedded import tasks
        from models.embedded.checkpoint import BLOCK
        from models.published import PUBLISHED

    items = tasks.make_items("heldout", _FRONT_ITEMS * count, arguments.seed)
    runs, padded = prepare_runs(choices, model, tokenizer, items, name=arguments.model, seed=arguments.seed)
    assert tokenizer is not None  # or it was refused
    prompts = pick_prompts(tokenizer, count, arguments.seed)
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    traces: dict[str, list[Any]] = {"alone": [], "parallel": [], "cached": []}
    # One token per forward, in parallel, and with a cache: what figures 3 and 4, 8, and 3a and 6a look at.
    settings = {
        "alone": (methods.parallel(threshold=2.0, block_length=BLOCK), 1),
        "parallel": (methods.parallel(block_length=BLOCK), count),
        "cached": (cached_method(BLOCK), count),
    }
    for name, (method, number) in settings.items():
        for place, prompt in enumerate(prompts[:number]):
            with notes.status(f"tracing {name} {place + 1}/{number}"):
                trace = record_trace(model, params, method, prompt, tasks.ANSWER_LENGTH, arguments.seed)
                traces[name].append(trace)
    alone, cached = traces["alone"][0], traces["cached"][0]
    accuracy = drift_study.selection_accuracy(traces["cached"], seed=arguments.seed)
    with notes.status("timing"):
        # One token per forward, so that every kind of forward comes often.
        compared = [cached_method(BLOCK), methods.polestar(tau=2.0, suffix_commit=False, block_length=BLOCK)]
        timing = [row for each in compared for row in time_kinds(model, params, each, prompts[:8], tasks.ANSWER_LENGTH)]
        parts = time_parts(model, params, len(prompts[0]) + tasks.ANSWER_LENGTH, BLOCK)
    published = PUBLISHED["dream-7b" if model.shift else "llada-8b"]
    memory = [
        {"method": name, "parts": state_bytes(published, method, 1024, 512)}
        for name, method in (
            ("fast_dllm", methods.fast_dllm()),
            ("d2cache", methods.d2cache()),
            ("elastic_cache", methods.elastic_cache()),
            ("polestar, not coded", methods.polestar(format="none")),
            ("polestar", methods.polestar()),
        )
    ]
    if measured is None:
        decode_items(runs, params, items, padded, tokenizer, arguments.seed, notes)
        front, title = [make_row(run, items) for run in runs], f"{arguments.model}, {len(items)} held-out items"
    else:
        front, title = measured, f"from {arguments.front}"
    words = [tokenizer.decode([token], skip_special_tokens=False) for token in alone.tokens[-1]]
    shown: dict[str, tuple[Any, ...]] = {
        "3a-error": (cached,),
        "3b-progress": (alone,),
        "3c-trajectories": (alone,),
        "4-heatmap": (alone, -1, words),
        "6a-policies": (accuracy,),
        "8-commits": (traces["parallel"],),
        "12-timing": (timing, parts),
        "13-memory": (memory, "P 1024, G 512, S 32, bfloat16, batch 1: from shapes, flat over forwards"),
        "1-front": (front, "tps", title),
    }
    for name, values in shown.items():
        figures.FIGURES[name](*values).savefig(folder / f"{name}.png")
    shares = drift_study.cumulative_error(cached)[-1]
    record = {
        "environment": describe_environment(dtype=model.config.dtype, command=arguments.words),
        "model": arguments.model,
        "items": len(prompts),
        "selection_accuracy": accuracy,
        "error_share": dict(zip(drift_study.GROUPS, shares.tolist(), strict=True)),
        "median_drift_by_commits": {
            name: float(sorted(values)[len(values) // 2])
            for name, values in drift_study.drift_by_commits(traces["parallel"]).items()
        },
        "timing": timing,
        "timing_of_parts": parts,
        "memory": memory,
        "front": [{name: value for name, value in row.items() if name != "config"} for row in front],
        "front_from": arguments.front or "measured here",
    }
    (folder / "figures.json").write_text(json.dumps(record, indent=1) + "\n")
    results.print(f"{len(shown)} figures in {folder}")
    for name, value in accuracy.items():
        results.print(f"  most stale 25 % found by {name}: {value:.0%}")


def _read_front(file: str) -> list[dict[str, Any]]:
    """The rows of `polestar demo --json`."""
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"--front {file}: there is no such file; `polestar demo --json FILE` writes it")
    try:
        rows = json.loads(path.read_text())["rows"]
        lacking = {field for row in rows for field in ("method", "accuracy", "tpf", "tps") if field not in row}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--front {file} was not written by `polestar demo --json`") from error
    if lacking or not rows:
        raise ValueError(f"--front {file} has no rows with method, accuracy, tpf and tps")
    return rows
