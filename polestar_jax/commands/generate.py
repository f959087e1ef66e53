"""Decodes one prompt.

examples:
  polestar generate --prompt "ann has 5 pens . she buys 3 . how many ?" --gen-length 48 --block-length 8
  polestar generate --model path/to/LLaDA-8B-Instruct --method polestar:release --set suffix_commit=false \\
      --prompt-ids 126080,5,17 --gen-length 256 --block-length 32 --json -
  polestar generate --model path/to/LLaDA-8B-Instruct --chat --prompt "How many days has a week?" \\
      --gen-length 64 --block-length 32
  polestar generate --prompt "bob has 5 pens . he buys 3 . how many ?" --gen-length 48 --block-length 8 --show
"""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console

from polestar_jax.commands.options import add_json, add_model, add_seed
from polestar_jax.commands.output import STDOUT, check_target, make_consoles, write_json
from polestar_jax.commands.prompt_options import add_prompt, check_prompt, encode_prompt
from polestar_jax.commands.show_option import TERMINAL, add_show, check_show, terminal_delay, write_show

if TYPE_CHECKING:
    from polestar_jax import Decode, DecodeState, StepLog
    from polestar_jax.metrics import Metrics
    from polestar_jax.show import Stage

SUMMARY = "decode one prompt with one method"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "an embedded checkpoint or a Hugging Face folder; one without a tokenizer takes --prompt-ids")
    parser.add_argument(
        "--method",
        default="polestar",
        metavar="NAME[:PRESET]",
        help="such as vanilla or polestar:release; an unknown name lists them all (default: %(default)s)",
    )
    add_prompt(parser)
    parser.add_argument("--gen-length", type=int, required=True, metavar="G", help="tokens to generate")
    parser.add_argument("--block-length", type=int, required=True, metavar="S", help="G is a multiple of it")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the method, such as threshold=0.8; may be repeated, an unknown field lists them all",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights (default: as in the file)")
    add_seed(parser, "of methods that draw")
    add_json(parser)
    add_show(parser, "how the text fills in")


def run(arguments: argparse.Namespace) -> None:
    results, notes = make_consoles(arguments.json)
    check_target("--json", arguments.json)
    check_show(arguments, notes)
    prompt = check_prompt(arguments)
    with notes.status("loading"):
        import jax

        from polestar_jax import load, make_decode, pad_prompts
        from polestar_jax.commands.method_arguments import parse_method
        from polestar_jax.environment import describe_environment
        from polestar_jax.metrics import before_eos, measure
        from polestar_jax.show import make_stage, replay_log

        choice = parse_method(arguments.method, arguments.set)
        model, params, tokenizer = load(arguments.model, dtype=arguments.dtype)
        method = choice.build(arguments.block_length, tokenizer)
    ids = encode_prompt(prompt, arguments, tokenizer, model.config.vocab_size, notes)
    decode = make_decode(model, method, gen_length=arguments.gen_length)
    state = decode.init(jax.random.split(jax.random.key(arguments.seed), 1), prompt_length=len(ids))
    state = decode.start(state, pad_prompts([ids]))
    stage = make_stage(decode, ids, tokenizer)
    if arguments.show == TERMINAL:
        state = _decode_on_screen(decode, params, state, stage, notes, terminal_delay(arguments))
    else:
        state = _decode_with_progress(decode, params, state, notes)

    output = jax.device_get(decode.output(state))
    if arguments.show is not None:
        write_show(arguments, notes, [(stage, list(replay_log(stage, output.log)))])
    metrics = measure(output, eos_id=model.config.eos_id, kinds=decode.kinds)
    forwards = int(metrics.forwards[0])
    text = None
    if tokenizer is not None:
        text = tokenizer.decode(before_eos(output.tokens[0], model.config.eos_id).tolist())
    if not output.filled.all():
        notes.print(f"polestar: warning: {(~output.filled).sum()} positions were left masked", soft_wrap=True)
    if arguments.json != STDOUT:
        shown = ",".join(map(str, output.tokens[0])) if text is None else text
        results.print(shown, markup=False, soft_wrap=True)
        results.print(_describe(metrics), style="dim", soft_wrap=True)
    result = {
        "tokens": output.tokens[0].tolist(),
        "text": text,
        "forwards": forwards,
        "rows_per_forward": [round(rows, 4) for rows in output.log.rows[0, :forwards].tolist()],
        "commits": {reason: int(count[0]) for reason, count in metrics.commits.items()},
        "environment": describe_environment(dtype=model.config.dtype, command=arguments.words),
    }
    write_json(arguments.json, result)


def passes(decode: "Decode", params: Any, state: "DecodeState") -> Iterator[tuple["DecodeState", "StepLog"]]:
    """Yields the state and the log entry of every pass of the loop, from a started state to the end of the decode."""
    while not decode.finished(state).all():
        state, entry = decode.step(params, state)
        yield state, entry


def _decode_with_progress(decode: "Decode", params: Any, started: "DecodeState", notes: Console) -> "DecodeState":
    """The state after the last forward. Steps instead of one call, so that there is progress to see."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    state = started
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
    )
    hidden = not notes.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=notes, transient=True, disable=hidden) as progress:
        task = progress.add_task("compiling", total=decode.gen_length, start=False)
        for state, _ in passes(decode, params, started):
            left = int(state.canvas.masked.sum())
            progress.start_task(task)
            progress.update(task, description="decoding", completed=decode.gen_length - left)
    return state


def _decode_on_screen(
    decode: "Decode", params: Any, started: "DecodeState", stage: "Stage", notes: Console, delay: float
) -> "DecodeState":
    """The state after the last forward, while the canvas fills in on the terminal."""
    import jax

    from polestar_jax.commands.show_terminal import screen
    from polestar_jax.show import first_frame, next_frame

    state, frame, following = started, first_frame(stage), passes(decode, params, started)
    with notes.status("compiling"):
        passed = next(following, None)
    with screen(stage, notes, delay) as show:
        show(frame)
        while passed is not None:
            state, entry = passed
            frame = next_frame(stage, frame, jax.device_get(entry))
            show(frame)
            passed = next(following, None)
    return state


def _describe(metrics: "Metrics") -> str:
    """What the decode cost, in a line."""
    from polestar_jax.metrics import summarize

    summary = summarize(metrics)
    commits = ", ".join(f"{count:.0f} {reason}" for reason, count in summary["commits"].items())
    kinds = ", ".join(f"{count:.0f} {name}" for name, count in summary["kinds"].items())
    return (
        f"{summary['forwards']:.0f} forwards ({kinds}), {summary['positions_per_forward']:.2f} canvas positions and"
        f" {summary['tpf']:.2f} non-EOS tokens per forward, {summary['rows']:.1f} rows per forward"
        f" ({summary['rows_executed']:.1f} executed); commits: {commits}"
    )
