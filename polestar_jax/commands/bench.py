"""Times methods on random weights, at the tokens per forward that the paper reports for each.

How many tokens a forward commits is replayed: drawn once from a geometric distribution with the paper's mean, the same
in every round. Compilation is excluded; the methods run in turn in every round, so that the machine's load falls on
all alike.

examples:
  polestar bench --shape small
  polestar bench --shape medium --rounds 3 --json bench.json
  polestar bench --shape llada-8b --methods fast_dllm,polestar     # bfloat16, 17 GB: for a GPU
"""

import argparse
from typing import TYPE_CHECKING, Any

from polestar_jax.commands.options import add_json, add_seed
from polestar_jax.commands.output import check_target, make_consoles, write_json

if TYPE_CHECKING:
    from rich.table import Table

SUMMARY = "time methods on random weights at given tokens per forward"

_SHAPES = ("tiny", "small", "medium", "llada-8b")
_KINDS = ("step", "refresh", "entry")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=_SHAPES, default="small", help="sizes (default: %(default)s)")
    parser.add_argument(
        "--methods",
        default="vanilla,parallel,fast_dllm,polestar",
        metavar="A,B,...",
        help="each NAME[:PRESET][:FIELD=VALUE...], or all (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds that count (default: %(default)s)")
    add_seed(parser, "of the weights, the prompt and the replayed commits")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    if arguments.rounds < 1:
        raise ValueError(f"--rounds {arguments.rounds} must be at least 1")
    check_target("--json", arguments.json)
    import jax
    import numpy as np
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from models.transformer import Config, Transformer
    from polestar_jax import benchmark
    from polestar_jax.commands.method_arguments import parse_methods
    from polestar_jax.environment import describe_environment, format_environment

    console, notes = make_consoles(arguments.json)
    shape = benchmark.SHAPES[arguments.shape]
    model = Transformer(Config(family="llada", **shape.model))
    params = model.init(jax.random.key(arguments.seed))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    ids = np.random.default_rng(arguments.seed).integers(0, model.config.eos_id, (1, shape.prompt_length))
    choices = parse_methods(arguments.methods)
    means = benchmark.paper_commits([choice.label for choice in choices])
    timings = [
        benchmark.prepare(
            model, shape, choice.label, choice.build(shape.block_length), means[choice.label], arguments.seed
        )
        for choice in choices
    ]
    steps = [benchmark.SAMPLED_FORWARDS if timing.scaled else timing.forwards + 1 for timing in timings]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True) as progress:
        task = progress.add_task("", total=sum(steps) * (arguments.rounds + 1))
        for number in range(arguments.rounds + 1):
            for timing in timings:
                what = f"round {number} of {arguments.rounds}" if number else "compiling"
                progress.update(task, description=f"{what}: {timing.label}")
                benchmark.run_round(timing, params, ids, lambda: progress.advance(task))
                if not number:
                    benchmark.forget(timing)
    results = [benchmark.summarise(timing, shape) for timing in timings]
    environment = describe_environment(dtype=model.config.dtype, command=arguments.words)
    sizes = f"{count / 1e6:.1f} M parameters, P {shape.prompt_length}, G {shape.gen_length}, S {shape.block_length}"
    console.print(_table(f"{arguments.shape}: {sizes}, batch 1, {arguments.rounds} rounds", results))
    console.print("ms: median of one forward ± half the interquartile range. TPS: generated positions per second.")
    if any(result["scaled"] for result in results):
        console.print(
            f"* its forwards are all alike: {benchmark.SAMPLED_FORWARDS} were timed a round, and scaled to the decode."
        )
    console.print(format_environment(environment))
    content = {"environment": environment, "shape": arguments.shape, "parameters": count, "rows": results}
    write_json(arguments.json, content)


def _table(title: str, results: list[dict[str, Any]]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for name in ("method", "positions\n/forward", *(f"{kind}\nms" for kind in _KINDS), "rows (run)\n/forward"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    table.add_column("time in\nentries", justify="right", no_wrap=True)
    table.add_column("TPS", justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result["method"] + (" *" if result["scaled"] else ""),
            f"{result['positions_per_forward']:.2f}",
            *(_milliseconds(result["ms"], kind) for kind in _KINDS),
            f"{result['rows']:.0f} ({result['rows_executed']:.0f})".replace(f" ({result['rows']:.0f})", ""),
            f"{result['entry_share']:.0%}",
            f"{result['tps']:.1f}",
        )
    return table


def _milliseconds(kinds: dict[str, dict[str, float]], kind: str) -> str:
    """The cell of one kind of forward, a line for each variant; forwards that are all alike count as steps."""
    lines = []
    for name, stats in kinds.items():
        if name.split()[-1] == kind or (name == "full" and kind == "step"):
            digits = 0 if stats["median"] >= 100 else 1
            if name.endswith(" entry"):  # two kinds in a column: their spread is in the JSON only
                lines.append(f"{name.split()[0]} {stats['median']:.{digits}f}")
            else:
                lines.append(f"{stats['median']:.{digits}f} ±{(stats['q3'] - stats['q1']) / 2:.{digits}f}")
    return "\n".join(lines)
