"""Several methods in turn on the same held-out items, one item at a time: what `polestar demo` and figure 1 measure.

The methods take turns on every item, so that the load of the machine falls on all alike.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from models.embedded.tasks import Item
    from polestar_jax import Decode, DecodeOutput, DecodeState, Model, Prompt
    from polestar_jax.commands.method_arguments import Choice
    from polestar_jax.metrics import Metrics


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


def prepare_runs(
    choices: Sequence["Choice"], model: "Model", tokenizer: Any, items: Sequence["Item"], *, name: str, seed: int
) -> tuple[list[Run], list["Prompt"]]:
    """A run per method, nothing decoded yet, and a padded prompt per item.

    Args:
      choices: the methods.
      model, tokenizer: a checkpoint that knows the items' words.
      items: of `models.embedded.tasks`.
      name: of the checkpoint, for messages and the record.
      seed: for the record.

    Raises:
      ValueError: the checkpoint has no tokenizer, or does not know the words.
    """
    from models.embedded import tasks
    from polestar_jax import pad_prompts

    ids = _encode(items, tokenizer, name)
    length = max(tasks.PROMPT_LENGTH, *map(len, ids))
    settings = {"model": name, "items": len(items), "seed": seed, "prompt_length": length}
    runs = [_prepare(choice, model, tokenizer, settings) for choice in choices]
    return runs, [pad_prompts([each], length) for each in ids]


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


def item_keys(seed: int, number: int) -> Any:
    """The random keys `[1]` of an item."""
    import jax

    return jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 1)


def decode_items(
    runs: Sequence[Run],
    params: Any,
    items: Sequence["Item"],
    prompts: Sequence["Prompt"],
    tokenizer: Any,
    seed: int,
    notes: Console,
) -> None:
    """Fills in the runs' metrics, marks and times, compilation not counted, with a bar for each on `notes`."""
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
            run(params, prompts[0], item_keys(seed, 0))
            run.seconds = 0.0
            progress.update(bar, news="compiled")
        for bar in bars:
            progress.start_task(bar)
        for number, (item, prompt) in enumerate(zip(items, prompts, strict=True)):
            keys = item_keys(seed, number)
            for run, bar in zip(runs, bars, strict=True):
                output = jax.device_get(run(params, prompt, keys.copy()))
                eos_id = run.decode.model.config.eos_id
                text = tokenizer.decode(before_eos(output.tokens[0], eos_id).tolist(), skip_special_tokens=False)
                run.metrics.append(measure(output, eos_id=eos_id, kinds=run.decode.kinds))
                run.correct.append(tasks.is_correct(item, text))
                right = sum(run.correct) / len(run.correct)
                progress.update(bar, advance=1, news=f"{right:.0%} right, {run.seconds / len(run.correct):.2f} s each")
