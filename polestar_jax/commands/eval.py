"""Runs benchmarks through lm-eval (needs the extra: pip install "polestar-jax[eval]").

Tasks: gsm8k, math, humaneval, mbpp (rows from the hub, or from local jsonl files), lists_easy, lists_hard,
latin_square, sudoku, embedded (made here, no download), and every task of lm-eval by its name.

examples:
  polestar eval --tasks embedded,lists_easy --limit 20 --gen-length 48 --block-length 8
  polestar eval --tasks gsm8k --rows gsm8k=test.jsonl --shots gsm8k=train.jsonl --model path/to/LLaDA-8B-Instruct \\
      --chat single_user --gen-length 256 --block-length 32 --method polestar --out runs/gsm8k
"""

import argparse
from pathlib import Path
from typing import Any

from polestar_jax.commands.benchmark_options import (
    add_benchmark,
    check_benchmark,
    check_programs,
    make_adapter,
    read_tasks,
)
from polestar_jax.commands.options import add_json, add_model, add_seed
from polestar_jax.commands.output import STDOUT, check_target, make_consoles, write_json

SUMMARY = "run benchmarks with one method"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", required=True, metavar="A,B,...", help="see above")
    add_model(parser, "an embedded checkpoint or a converted or Hugging Face folder")
    parser.add_argument("--method", default="polestar", metavar="NAME[:PRESET][:FIELD=VALUE...]")
    add_benchmark(parser)
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="keep answers, samples and the run record here; the same command goes on where a killed one was",
    )
    add_seed(parser, "of exercises, of methods that draw, and of likelihoods")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    results, notes = make_consoles(arguments.json)
    check_target("--json", arguments.json)
    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    check_benchmark(arguments)
    with notes.status("loading"):
        from polestar_jax import load
        from polestar_jax.commands.method_arguments import describe_method, parse_method
        from polestar_jax.environment import describe_environment
        from polestar_jax.evaluation.run import evaluate

        choice = parse_method(arguments.method)
        tasks = read_tasks(names, arguments)
        check_programs(names, arguments.out is not None, notes)
        checkpoint = load(arguments.model, dtype=arguments.dtype)
        method = choice.build(arguments.block_length, checkpoint[2])
    answers = str(Path(arguments.out) / "answers.jsonl") if arguments.out else None
    adapter = make_adapter(arguments, checkpoint, method, answers)
    outcome = evaluate(adapter, tasks, limit=arguments.limit)
    record = {
        "environment": describe_environment(dtype=checkpoint[0].config.dtype, command=arguments.words),
        "model": arguments.model,
        "method": describe_method(method),
        "gen_length": arguments.gen_length,
        "chat": arguments.chat,
        "seed": arguments.seed,
        "compiled_shapes": sorted(adapter.shapes),
        "results": outcome["results"],
    }
    if arguments.out:
        write_json(str(Path(arguments.out) / "results.json"), record)
        write_json(str(Path(arguments.out) / "samples.json"), {"samples": outcome["samples"]})
    write_json(arguments.json, record)
    if arguments.json != STDOUT:
        results.print(_table(outcome["results"]))


def _table(results: dict[str, dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("task", "metric", "value", "TPF", "forwards", "rows per forward")
    for task, found in results.items():
        costs = [""] * 3
        if "forwards" in found:
            costs = [
                f"{found['tpf_total']:.2f}",
                f"{found['forwards']:.1f}",
                f"{found['rows'] / found['forwards']:.1f}",
            ]
        for metric, value in found.items():
            name, comma, filter_name = metric.partition(",")
            if not comma or name.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            label = name if filter_name == "none" else f"{name} ({filter_name})"
            table.add_row(task, label, f"{100 * value:.1f} %", *costs)
            task, costs = "", [""] * 3
    return table
