"""Runs benchmarks through lm-eval (needs the extra: pip install "polestar-jax[eval]").

Tasks: gsm8k, math, humaneval, mbpp (rows from the hub, or from local jsonl files), lists_easy, lists_hard,
latin_square, sudoku, embedded (made here, no download), and every task of lm-eval by its name.

examples:
  polestar eval --tasks embedded,lists_easy --limit 20 --gen-length 48 --block-length 8
  polestar eval --tasks gsm8k --rows gsm8k=test.jsonl --shots gsm8k=train.jsonl --model path/to/LLaDA-8B-Instruct \\
      --chat single_user --gen-length 256 --block-length 32 --method polestar --out runs/gsm8k
"""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polestar_jax.commands.options import add_json, add_model, add_seed
from polestar_jax.commands.output import STDOUT, check_target, make_consoles, write_json

SUMMARY = "run benchmarks with one method"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", required=True, metavar="A,B,...", help="see above")
    add_model(parser, "an embedded checkpoint or a converted or Hugging Face folder")
    parser.add_argument("--method", default="polestar", metavar="NAME[:PRESET][:FIELD=VALUE...]")
    parser.add_argument("--gen-length", type=int, required=True, metavar="G", help="tokens to generate")
    parser.add_argument("--block-length", type=int, required=True, metavar="S", help="G is a multiple of it")
    for option, what in (("--rows", "documents"), ("--shots", "worked examples")):
        parser.add_argument(option, action="append", default=[], metavar="TASK=FILE", help=f"jsonl with the {what}")
    parser.add_argument("--limit", type=int, metavar="N", help="documents per task (default: all)")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="exercises to make (default: %(default)s)")
    parser.add_argument(
        "--chat",
        choices=("raw", "single_user", "multiturn"),
        default="raw",
        help="the text as it is, as one user turn (how the papers ran instruct models), or turn by turn",
    )
    parser.add_argument("--bos", action="store_true", help="begin raw text with BOS, as Dream's harness does")
    parser.add_argument("--truncate", action="store_true", help="cut prompts that are too long, on the left")
    parser.add_argument("--batch-size", type=int, default=1, metavar="B", help="prompts decoded together")
    parser.add_argument("--bucket", type=int, default=64, metavar="N", help="prompts are padded to a multiple of this")
    parser.add_argument("--samples", type=int, default=128, help="masked copies per likelihood (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights (default: as in the file)")
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
    rows, shots = (_read_pairs(option, getattr(arguments, option)) for option in ("rows", "shots"))
    if arguments.limit is not None and arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit} must be at least 1")
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError('polestar eval needs lm-eval: pip install "polestar-jax[eval]"')
    with notes.status("loading"):
        from polestar_jax import load
        from polestar_jax.commands.method_arguments import describe_method, parse_method
        from polestar_jax.environment import describe_environment
        from polestar_jax.evaluation.adapter import PolestarLM
        from polestar_jax.evaluation.run import evaluate
        from polestar_jax.evaluation.tasks import make_tasks

        method = parse_method(arguments.method).build(arguments.block_length)
        model, params, tokenizer = load(arguments.model, dtype=arguments.dtype)
        tasks = make_tasks(names, rows=rows, shots=shots, count=arguments.count, seed=arguments.seed)
    adapter = PolestarLM(
        model,
        params,
        tokenizer,
        method,
        gen_length=arguments.gen_length,
        name=arguments.model,
        batch_size=arguments.batch_size,
        bucket=arguments.bucket,
        chat=arguments.chat,
        bos=True if arguments.bos else None,
        truncate=arguments.truncate,
        answers=str(Path(arguments.out) / "answers.jsonl") if arguments.out else None,
        seed=arguments.seed,
        samples=arguments.samples,
    )
    outcome = evaluate(adapter, tasks, limit=arguments.limit)
    record = {
        "environment": describe_environment(dtype=model.config.dtype, command=arguments.words),
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


def _read_pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for (task, equals, file), word in zip(pairs, words, strict=True):
        if not (task and equals and file):
            raise ValueError(f"--{option} {word!r} is not TASK=FILE, such as gsm8k=test.jsonl")
    return {task: file for task, _, file in pairs}


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
