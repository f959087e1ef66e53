"""Decodes held-out items of the embedded checkpoint with several methods and compares them.

Items are decoded one at a time, the methods in turn on every item, so that the load of the machine falls on all alike.

examples:
  polestar demo --items 100 --plot demo.png
  polestar demo --items 1 --methods parallel,fast_dllm,polestar --show demo.gif
  polestar demo --methods polestar,polestar:suffix_commit=false,polestar:drift_gate=false:suffix_commit=false
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from polestar_jax.commands.options import add_json, add_model, add_seed
from polestar_jax.commands.output import check_target, make_consoles, write_json
from polestar_jax.commands.show_option import TERMINAL, add_show, check_show, terminal_delay, write_show

if TYPE_CHECKING:
    from models.embedded.tasks import Item
    from polestar_jax import Decode, DecodeOutput, DecodeState, Prompt
    from polestar_jax.commands.method_arguments import Choice
    from polestar_jax.metrics import Metrics

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


@dataclasses.dataclass
class Run:
    """One method on its way through the items.

    Attributes:
      choice: the method as the user asked for it.
      config: everything that decides its numbers.
      decode, state: ready for the next item.
      metrics, correct: of every item so far.
      seconds: wall time of the decodes.
    """

    choice: "Choice"
    config: dict[str, Any]
    decode: "Decode"
    state: "DecodeState"
    metrics: list["Metrics"] = dataclasses.field(default_factory=list)
    correct: list[bool] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def __call__(self, params: Any, prompt: "Prompt", keys: Any) -> "DecodeOutput":
        """Decodes one prompt, and keeps the time it took."""
        import jax

        state = dataclasses.replace(self.state, keys=keys)
        start = time.perf_counter()
        output, self.state = jax.block_until_ready(self.decode(params, state, prompt))
        self.seconds += time.perf_counter() - start
        return output


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

        from polestar_jax import load, pad_prompts
        from polestar_jax.commands import demo_report
        from polestar_jax.commands.method_arguments import parse_methods
        from polestar_jax.environment import describe_environment

        choices = parse_methods(arguments.methods)
        model, params, tokenizer = load(arguments.model)
        from models.embedded import tasks  # after `load`, which makes sure that `models` is ours

    items = tasks.make_items("heldout", arguments.items, arguments.seed)
    ids = _encode(items, tokenizer, arguments.model)
    length = max(tasks.PROMPT_LENGTH, *map(len, ids))
    prompts = [pad_prompts([each], length) for each in ids]
    settings = {"model": arguments.model, "items": arguments.items, "seed": arguments.seed, "prompt_length": length}
    runs = [_prepare(choice, model, tokenizer, settings) for choice in choices]
    if arguments.show is not None:
        _show_first(runs, params, ids[0], prompts[0], tokenizer, arguments, notes)
    _decode_all(runs, params, items, prompts, tokenizer, arguments.seed, notes)

    rows = [demo_report.make_row(run, items) for run in runs]
    environment = describe_environment(dtype=model.config.dtype, command=arguments.words)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    demo_report.print_report(results, runs, rows, environment, size)
    write_json(arguments.json, {"environment": environment, "rows": rows})
    if arguments.plot:
        from polestar_jax.commands.demo_plot import draw

        draw(rows, arguments.plot, f"{arguments.model}, {len(items)} held-out items")


def _encode(items: Sequence["Item"], tokenizer: Any, name: str) -> list[list[int]]:
    if tokenizer is None:
        raise ValueError(f"--model {name} has no tokenizer; the demo's items are words")
    if any(tokenizer.unknown_words(item.prompt) for item in items):
        raise ValueError(f"--model {name} does not know the words of the demo's items; give an embedded checkpoint")
    return [tokenizer.encode(item.prompt) for item in items]


def _prepare(choice: "Choice", model: Any, tokenizer: Any, settings: dict[str, Any]) -> Run:
    import jax

    from models.embedded import checkpoint, tasks
    from polestar_jax import make_decode
    from polestar_jax.commands.method_arguments import describe_method

    method = choice.build(checkpoint.BLOCK, tokenizer)
    decode = make_decode(model, method, gen_length=tasks.ANSWER_LENGTH)
    state = decode.init(jax.random.split(jax.random.key(0), 1), prompt_length=settings["prompt_length"])
    return Run(choice, settings | {"gen_length": decode.gen_length} | describe_method(method), decode, state)


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
            output = jax.device_get(run(params, prompt, _keys(arguments.seed, 0)))
        pads = prompt.tokens.shape[1] - len(ids)
        stage = make_stage(run.decode, ids, tokenizer, title=run.choice.label, pads=pads)
        decodes.append((stage, list(replay_log(stage, output.log))))
        if arguments.show == TERMINAL:
            with screen(stage, notes, terminal_delay(arguments)) as show:
                for frame in decodes[-1][1]:
                    show(frame)
            notes.print()
    write_show(arguments, notes, decodes)


def _keys(seed: int, number: int) -> Any:
    """The random keys `[1]` of an item."""
    import jax

    return jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 1)


def _decode_all(
    runs: Sequence[Run],
    params: Any,
    items: Sequence["Item"],
    prompts: Sequence["Prompt"],
    tokenizer: Any,
    seed: int,
    notes: Console,
) -> None:
    """Fills in the runs' metrics, marks and times, with a bar for each."""
    import jax
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from models.embedded import tasks
    from polestar_jax.metrics import before_eos, measure

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    if not notes.is_terminal:
        notes.print(f"decoding {len(items)} items with {', '.join(run.choice.label for run in runs)}", soft_wrap=True)
    progress = Progress(
        *columns,
        TextColumn("{task.fields[news]}"),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
        refresh_per_second=4,  # drawing bars takes time from the decode that is being timed
    )
    with progress:
        bars = [progress.add_task(run.choice.label, total=len(items), start=False, news="waiting") for run in runs]
        for run, bar in zip(runs, bars, strict=True):
            progress.update(bar, news="compiling")
            run(params, prompts[0], _keys(seed, 0))
            run.seconds = 0.0
            progress.update(bar, news="compiled")
        for bar in bars:
            progress.start_task(bar)
        for number, (item, prompt) in enumerate(zip(items, prompts, strict=True)):
            keys = _keys(seed, number)
            for run, bar in zip(runs, bars, strict=True):
                output = jax.device_get(run(params, prompt, keys.copy()))
                eos_id = run.decode.model.config.eos_id
                text = tokenizer.decode(before_eos(output.tokens[0], eos_id).tolist(), skip_special_tokens=False)
                run.metrics.append(measure(output, eos_id=eos_id, kinds=run.decode.kinds))
                run.correct.append(tasks.is_correct(item, text))
                right = sum(run.correct) / len(run.correct)
                progress.update(bar, advance=1, news=f"{right:.0%} right, {run.seconds / len(run.correct):.2f} s each")
