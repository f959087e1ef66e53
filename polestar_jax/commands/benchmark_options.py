"""Options of commands that run benchmarks through lm-eval, and what is made of them."""

import argparse
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from polestar_jax.evaluation.adapter import PolestarLM
    from polestar_jax.types import Method


def add_benchmark(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Adds what a benchmark is asked with; `arguments.seed` and `arguments.model` are the command's own."""
    parser.add_argument("--gen-length", type=int, required=required, metavar="G", help="tokens to generate")
    parser.add_argument("--block-length", type=int, required=required, metavar="S", help="G is a multiple of it")
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


def check_benchmark(arguments: argparse.Namespace) -> None:
    """Refuses what can be seen to be wrong before anything heavy is imported.

    Raises:
      ValueError: naming the option and its value.
      ImportError: lm-eval is not installed.
    """
    for option in ("rows", "shots"):
        _read_pairs(option, getattr(arguments, option))
    if arguments.limit is not None and arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit} must be at least 1")
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError('benchmarks need lm-eval: pip install "polestar-jax[eval]"')


def check_programs(names: Sequence[str], keeps_answers: bool, notes: Console) -> None:
    """Says before hours of decoding where a task's programs cannot be run.

    Args:
      names: of tasks.
      keeps_answers: so that they can be scored on another machine; then it is a warning.
      notes: console for it.

    Raises:
      SandboxUnavailable: programs cannot be isolated here, and answers would be lost.
    """
    from polestar_jax.evaluation.sandbox import SandboxUnavailable, run_program
    from polestar_jax.evaluation.tasks import WITH_PROGRAMS

    if not any(name in WITH_PROGRAMS for name in names):
        return
    try:
        run_program("")
    except SandboxUnavailable as error:
        if not keeps_answers:
            raise
        notes.print(
            f"polestar: warning: {error}; answers are kept, and the same command scores them there", soft_wrap=True
        )


def read_tasks(names: Sequence[str], arguments: argparse.Namespace) -> list[str | dict[str, Any]]:
    """The tasks, with the rows that were given."""
    from polestar_jax.evaluation.tasks import make_tasks

    rows, shots = (_read_pairs(option, getattr(arguments, option)) for option in ("rows", "shots"))
    return make_tasks(names, rows=rows, shots=shots, count=arguments.count, seed=arguments.seed)


def make_adapter(
    arguments: argparse.Namespace, checkpoint: tuple[Any, Any, Any], method: "Method", answers: str | None
) -> "PolestarLM":
    """The language model that lm-eval sees: a checkpoint `(model, params, tokenizer)` with a method."""
    from polestar_jax.evaluation.adapter import PolestarLM

    return PolestarLM(
        *checkpoint,
        method,
        gen_length=arguments.gen_length,
        name=arguments.model,
        batch_size=arguments.batch_size,
        bucket=arguments.bucket,
        chat=arguments.chat,
        bos=True if arguments.bos else None,
        truncate=arguments.truncate,
        answers=answers,
        seed=arguments.seed,
        samples=arguments.samples,
    )


def _read_pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for (task, equals, file), word in zip(pairs, words, strict=True):
        if not (task and equals and file):
            raise ValueError(f"--{option} {word!r} is not TASK=FILE, such as gsm8k=test.jsonl")
    return {task: file for task, _, file in pairs}
