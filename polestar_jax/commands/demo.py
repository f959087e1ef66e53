"""Decodes held-out items of the embedded checkpoint with several methods and compares them.

Items are decoded one at a time, the methods in turn on every item, so that the load of the machine falls on all alike.

examples:
  polestar demo --items 100 --plot demo.png
  polestar demo --items 1 --methods parallel,fast_dllm,polestar --show demo.gif
  polestar demo --methods polestar,polestar:suffix_commit=false,polestar:drift_gate=false:suffix_commit=false
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from polestar_jax.commands.demo_runs import Run, decode_items, item_keys, prepare_runs
from polestar_jax.commands.options import add_json, add_model, add_seed
from polestar_jax.commands.output import check_target, make_consoles, write_json
from polestar_jax.commands.show_option import TERMINAL, add_show, check_show, terminal_delay, write_show

if TYPE_CHECKING:
    from polestar_jax import Prompt

SUMMARY = "compare methods on held-out items of the embedded checkpoint"

_IMAGES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--items", type=int, default=400, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument(
        "--methods",
        default="vanilla,parallel,fast_dllm,polestar",
        metavar="A,B,...",
        help="each NAME[:PRESET][:FIELD=VALUE...], or all (default: %(default)s)",
    )
    add_model(parser, "a checkpoint that was trained on the same tasks")
    add_seed(parser, "of the items, and of methods that draw")
    add_json(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw accuracy against tokens per forward (PNG, SVG or PDF)")
    add_show(parser, "how every method fills in the first item")


def run(arguments: argparse.Namespace) -> None:
    results, notes = make_consoles(arguments.json)
    check_target("--json", arguments.json)
    check_target("--plot", arguments.plot)
    if arguments.plot and Path(arguments.plot).suffix not in _IMAGES:
        raise ValueError(f"--plot {arguments.plot} must end in {', '.join(_IMAGES)}")
    check_show(arguments, notes)
    if arguments.items < 1:
        raise ValueError(f"--items {arguments.items} must be at least 1")
    with notes.status("loading"):
        import jax

        from polestar_jax import load
        from polestar_jax.commands import demo_report
        from polestar_jax.commands.method_arguments import parse_methods
        from polestar_jax.environment import describe_environment

        choices = parse_methods(arguments.methods)
        model, params, tokenizer = load(arguments.model)
        from models.embedded import tasks  # after `load`, which makes sure that `models` is ours

    items = tasks.make_items("heldout", arguments.items, arguments.seed)
    runs, prompts = prepare_runs(choices, model, tokenizer, items, name=arguments.model, seed=arguments.seed)
    assert tokenizer is not None  # or it was refused
    if arguments.show is not None:
        _show_first(runs, params, tokenizer.encode(items[0].prompt), prompts[0], tokenizer, arguments, notes)
    decode_items(runs, params, items, prompts, tokenizer, arguments.seed, notes)

    rows = [demo_report.make_row(run, items) for run in runs]
    environment = describe_environment(dtype=model.config.dtype, command=arguments.words)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    demo_report.print_report(results, runs, rows, environment, size)
    write_json(arguments.json, {"environment": environment, "rows": rows})
    if arguments.plot:
        from polestar_jax.commands.demo_plot import draw

        draw(rows, arguments.plot, f"{arguments.model}, {len(items)} held-out items")


def _show_first(
    runs: Sequence[Run],
    params: Any,
    ids: Sequence[int],
    prompt: "Prompt",
    tokenizer: Any,
    arguments: argparse.Namespace,
    notes: Console,
) -> None:
    """Decodes the first item with every method and shows how, in the terminal one after the other."""
    import jax

    from polestar_jax.commands.show_terminal import screen
    from polestar_jax.show import make_stage, replay_log

    decodes = []
    for run in runs:
        with notes.status(f"compiling {run.choice.label}"):
            output = jax.device_get(run(params, prompt, item_keys(arguments.seed, 0)))
        pads = prompt.tokens.shape[1] - len(ids)
        stage = make_stage(run.decode, ids, tokenizer, title=run.choice.label, pads=pads)
        decodes.append((stage, list(replay_log(stage, output.log))))
        if arguments.show == TERMINAL:
            with screen(stage, notes, terminal_delay(arguments)) as show:
                for frame in decodes[-1][1]:
                    show(frame)
            notes.print()
    write_show(arguments, notes, decodes)
