"""What the settings of a sweep are measured on: the exercises of an embedded checkpoint, or a benchmark."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from polestar_jax.commands.benchmark_options import make_adapter, read_tasks
from polestar_jax.types import Method


class Subject(NamedTuple):
    """What settings are measured on.

    Attributes:
      name: for titles.
      block_length, gen_length: S of a setting that does not vary it, G.
      key: tells results on one subject from those on another.
      measure: accuracy and costs of a method.
      prompts: ids of prompts of one length, for traces.
    """

    name: str
    block_length: int
    gen_length: int
    key: list[Any]
    measure: Callable[[Method], dict[str, Any]]
    prompts: Callable[[], list[list[int]]]


def take_exercises(arguments: argparse.Namespace, checkpoint: tuple[Any, Any, Any], count: int) -> Subject:
    """`count` held-out exercises of the embedded checkpoints.

    Raises:
      ValueError: the checkpoint has no tokenizer, or does not know the words.
    """
    from models.embedded import tasks
    from models.embedded.checkpoint import BLOCK
    from polestar_jax.analysis.prompts import pick_prompts
    from polestar_jax.evaluation.measure_points import measure_method

    items, seed, tokenizer = tasks.make_items("heldout", count, arguments.seed), arguments.seed, checkpoint[2]
    if tokenizer is None or any(tokenizer.unknown_words(item.prompt) for item in items):
        raise ValueError(
            f"--model {arguments.model} does not know the exercises' words: give an embedded checkpoint, or --task"
        )
    return Subject(
        f"{count} items",
        BLOCK,
        tasks.ANSWER_LENGTH,
        [count],
        lambda method: measure_method(*checkpoint, method, items, tasks.ANSWER_LENGTH, seed),
        lambda: pick_prompts(tokenizer, count, seed),
    )


def take_benchmark(
    arguments: argparse.Namespace, checkpoint: tuple[Any, Any, Any], limit: int | None, folder: Path
) -> Subject:
    """A task of `polestar eval`; answers are kept, so that a setting goes on where it was stopped too."""
    from polestar_jax.evaluation.measure_benchmark import measure_benchmark
    from polestar_jax.evaluation.run import prompts_of

    task = read_tasks([arguments.task], arguments)
    adapter = lambda method: make_adapter(arguments, checkpoint, method, str(folder / "answers.jsonl"))
    asked = ("task", "rows", "shots", "count", "chat", "bos", "truncate", "dtype")
    return Subject(
        f"{arguments.task}, {'all documents' if limit is None else f'{limit} documents'}",
        arguments.block_length,
        arguments.gen_length,
        [limit, arguments.gen_length, *(getattr(arguments, name) for name in asked)],
        lambda method: measure_benchmark(adapter(method), task, limit),
        lambda: prompts_of(adapter(_any_method(arguments.block_length)), task, limit or 50),
    )


def _any_method(block_length: int) -> Method:
    from polestar_jax import methods

    return methods.parallel(block_length=block_length)
