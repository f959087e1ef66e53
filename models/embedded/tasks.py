"""The generated tasks that the embedded checkpoint knows: worked arithmetic and waiting lines.

Everything is pure Python and deterministic from a seed. One word or number is one token. Whether a prompt is held out
is decided by a stable hash of its text, so no call can ever produce a held-out prompt for training.
"""

import dataclasses
import random
import zlib
from typing import Literal

TASKS = ("arithmetic", "lists")
PROMPT_LENGTH = 24
ANSWER_LENGTH = 48
LARGEST_NUMBER = 30  # that has a word
# Sums are learned one by one; an item reaches no more than those that a tiny model can hold.
_LARGEST_VALUE = 18
EOS, MASK, UNKNOWN = "<|endoftext|>", "<|mdm_mask|>", "<unk>"

_PRONOUNS = {
    "ann": "she", "bob": "he", "cara": "she", "dan": "he", "eva": "she", "finn": "he",
    "gus": "he", "hana": "she", "ivy": "she", "jack": "he", "kim": "she", "leo": "he",
}  # fmt: skip
_NAMES = tuple(_PRONOUNS)
_OBJECTS = ("pens", "books", "coins", "stamps", "shells", "cards", "marbles", "stones", "keys", "cups")
_GAINS = ("finds", "buys", "gets", "wins", "picks")
_LOSSES = ("gives", "loses", "sells", "drops", "breaks")
_LINE = 5  # names in a waiting line
# Words of tasks that were tried and not learned stay: the checkpoint's ids count them.
_VARIABLES = ("x", "y", "z")
_WORDS = (
    "has how many starts with so he she doubles them ? . + - * = : ; print"
    " line answer reverse the whole swap and replace move to front back"
).split()
VOCABULARY = (
    *(EOS, MASK, UNKNOWN),
    *map(str, range(LARGEST_NUMBER + 1)),
    *_NAMES,
    *_OBJECTS,
    *_GAINS,
    *_LOSSES,
    *_VARIABLES,
    *_WORDS,
)

Split = Literal["train", "heldout"]


@dataclasses.dataclass(frozen=True)
class Item:
    """One exercise.

    Attributes:
      task: one of `TASKS`.
      prompt: at most `PROMPT_LENGTH` words.
      answer: the worked answer, fewer than `ANSWER_LENGTH` words so that an end of text follows.
    """

    task: str
    prompt: str
    answer: str


def split_of(prompt: str) -> Split:
    """The side of the split a prompt is on, one in ten held out."""
    return "heldout" if zlib.crc32(prompt.encode()) % 10 == 0 else "train"


def make_items(
    split: Split, count: int, seed: int = 0, tasks: tuple[str, ...] = TASKS, *, easy: bool = False
) -> list[Item]:
    """Generates items of one side of the split.

    Args:
      split: "train" or "heldout".
      count: how many.
      seed: of the generator.
      tasks: taken in turn; a task named twice comes twice as often.
      easy: fewer operations, for the start of training.

    Returns:
      `count` items with distinct prompts.

    Raises:
      ValueError: if a task is unknown.
    """
    if unknown := set(tasks) - set(TASKS):
        raise ValueError(f"unknown tasks {sorted(unknown)}; there are {TASKS}")
    makers = {"arithmetic": _arithmetic, "lists": _lists}
    source = random.Random(f"{split} {seed} {easy}")
    items: list[Item] = []
    seen: set[str] = set()
    while len(items) < count:
        task = tasks[len(items) % len(tasks)]
        prompt, answer = makers[task](source, easy)
        fits = len(prompt.split()) <= PROMPT_LENGTH and len(answer.split()) < ANSWER_LENGTH
        if fits and prompt not in seen and split_of(prompt) == split:
            seen.add(prompt)
            items.append(Item(task, prompt, answer))
    return items


def final_answer(task: str, text: str) -> str | None:
    """What a worked answer arrives at: a number, or the names of a line; None if `text` does not get there."""
    words = text.split(EOS)[0].split()
    if task == "lists":
        return " ".join(_between(words, ("answer", ":"), ".")) or None
    return next(iter(_between(words, ("so",), ".")[2:]), None)  # so NAME has NUMBER THINGS .


def is_correct(item: Item, text: str) -> bool:
    """Whether `text` arrives at the right final answer, whatever its working says."""
    return final_answer(item.task, text) == final_answer(item.task, item.answer)


def is_exact(item: Item, text: str) -> bool:
    """Whether `text` is the reference answer word for word."""
    return text.split(EOS)[0].split() == item.answer.split()


def _between(words: list[str], marker: tuple[str, ...], end: str) -> list[str]:
    """The words after the last `marker`, up to `end` or the end of the text."""
    for start in range(len(words) - len(marker), -1, -1):
        if tuple(words[start : start + len(marker)]) == marker:
            rest = words[start + len(marker) :]
            return rest[: rest.index(end)] if end in rest else rest
    return []


def _arithmetic(source: random.Random, easy: bool) -> tuple[str, str]:
    """Two to four changes to how many things somebody has."""
    name, thing = source.choice(_NAMES), source.choice(_OBJECTS)
    value = source.randint(1, 9)
    prompt = [f"{name} has {value} {thing} ."]
    answer = [f"{name} starts with {value} {thing} ."]
    for _ in range(source.randint(1, 2) if easy else source.randint(2, 4)):
        if 0 < value <= _LARGEST_VALUE // 2 and source.random() < 0.12:
            prompt.append(f"{_PRONOUNS[name]} doubles them .")
            answer.append(f"{value} * 2 = {2 * value} .")
            value *= 2
            continue
        amount = source.randint(1, 9)
        gain = value < amount or (value + amount <= _LARGEST_VALUE and source.random() < 0.5)
        result = value + amount if gain else value - amount
        prompt.append(f"{_PRONOUNS[name]} {source.choice(_GAINS if gain else _LOSSES)} {amount} .")
        answer.append(f"{value} {'+' if gain else '-'} {amount} = {result} .")
        value = result
    prompt.append("how many ?")
    answer.append(f"so {name} has {value} {thing} .")
    return " ".join(prompt), " ".join(answer)


def _lists(source: random.Random, easy: bool) -> tuple[str, str]:
    """Two or three operations on a waiting line, every line in between written out.

    The line ends the prompt, so that each line of the answer begins as many words after the one it is made from.
    """
    line = source.sample(_NAMES, _LINE)
    given = ["line", *line, "?"]
    prompt: list[str] = []
    answer: list[str] = []
    for _ in range(1 if easy else source.randint(2, 3)):
        request, label, line = _operation(source, line)
        prompt.append(f"{request} .")
        answer.append(f"{label} : {' '.join(line)} .")
    return " ".join([*prompt, *given]), " ".join([*answer, f"answer : {' '.join(line)} ."])


def _operation(source: random.Random, line: list[str]) -> tuple[str, str, list[str]]:
    """One operation on a line: how the prompt asks for it, how the answer names it, and the new line."""
    kind = source.choice(("swap", "replace", "front", "back"))
    first, second = source.sample(line, 2)
    if kind == "swap":
        other = {first: second, second: first}
        return f"swap {first} and {second}", kind, [other.get(name, name) for name in line]
    if kind == "replace":
        new = source.choice([name for name in _NAMES if name not in line])
        return f"replace {first} with {new}", kind, [new if name == first else name for name in line]
    moved = source.choice(line[1:] if kind == "front" else line[:-1])
    rest = [name for name in line if name != moved]
    return f"move {moved} to {kind}", kind, [moved, *rest] if kind == "front" else [*rest, moved]
