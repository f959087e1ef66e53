"""The generated tasks that the embedded checkpoint knows: worked arithmetic, waiting lines, small programs.

Everything is pure Python and deterministic from a seed. One word or number is one token. Whether a prompt is held out
is decided by a stable hash of its text, so no call can ever produce a held-out prompt for training.
"""

import dataclasses
import random
import zlib
from typing import Literal

TASKS = ("arithmetic", "lists", "programs")
PROMPT_LENGTH = 24
ANSWER_LENGTH = 48
LARGEST_NUMBER = 40
EOS, MASK, UNKNOWN = "<|endoftext|>", "<|mdm_mask|>", "<unk>"

_PRONOUNS = {
    "ann": "she", "bob": "he", "cara": "she", "dan": "he", "eva": "she", "finn": "he",
    "gus": "he", "hana": "she", "ivy": "she", "jack": "he", "kim": "she", "leo": "he",
}  # fmt: skip
_NAMES = tuple(_PRONOUNS)
_OBJECTS = ("pens", "books", "coins", "stamps", "shells", "cards", "marbles", "stones", "keys", "cups")
_GAINS = ("finds", "buys", "gets", "wins", "picks")
_LOSSES = ("gives", "loses", "sells", "drops", "breaks")
_VARIABLES = ("x", "y", "z")
_WORDS = (
    "has how many starts with so he she doubles them ? . + - * = : ; print"
    " line answer reverse remove swap move front back insert and to after"
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
    makers = {"arithmetic": _arithmetic, "lists": _lists, "programs": _programs}
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
    if task == "arithmetic":  # so NAME has NUMBER THINGS .
        return next(iter(_between(words, ("so",), ".")[2:]), None)
    return next(iter(_between(words, ("print",), ";")), None)


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
    value = source.randint(1, 20)
    prompt = [f"{name} has {value} {thing} ."]
    answer = [f"{name} starts with {value} {thing} ."]
    for _ in range(source.randint(1, 2) if easy else source.randint(2, 4)):
        if 0 < value <= LARGEST_NUMBER // 2 and source.random() < 0.12:
            prompt.append(f"{_PRONOUNS[name]} doubles them .")
            answer.append(f"{value} * 2 = {2 * value} .")
            value *= 2
            continue
        amount = source.randint(1, 9)
        gain = value < amount or (value + amount <= LARGEST_NUMBER and source.random() < 0.5)
        result = value + amount if gain else value - amount
        prompt.append(f"{_PRONOUNS[name]} {source.choice(_GAINS if gain else _LOSSES)} {amount} .")
        answer.append(f"{value} {'+' if gain else '-'} {amount} = {result} .")
        value = result
    prompt.append("how many ?")
    answer.append(f"so {name} has {value} {thing} .")
    return " ".join(prompt), " ".join(answer)


def _lists(source: random.Random, easy: bool) -> tuple[str, str]:
    """Two or three operations on a waiting line, every line in between written out."""
    line = source.sample(_NAMES, source.randint(4, 5) if easy else source.randint(4, 6))
    prompt = ["line", *line, "."]
    answer: list[str] = []
    for _ in range(1 if easy else source.randint(2, 3)):
        request, label, line = _operation(source, line)
        prompt.append(f"{request} .")
        answer.append(f"{label} : {' '.join(line)} .")
    return " ".join([*prompt, "?"]), " ".join([*answer, f"answer : {' '.join(line)} ."])


def _operation(source: random.Random, line: list[str]) -> tuple[str, str, list[str]]:
    """One operation on a line: how the prompt asks for it, how the answer names it, and the new line."""
    kind = source.choice(("reverse", "remove", "swap", "front", "back", "insert"))
    first, second = source.sample(line, 2)
    if kind == "reverse":
        return kind, kind, line[::-1]
    if kind == "remove":
        return f"remove {first}", f"remove {first}", [name for name in line if name != first]
    if kind == "swap":
        other = {first: second, second: first}
        return f"swap {first} and {second}", f"swap {first} {second}", [other.get(name, name) for name in line]
    if kind == "insert":
        new = source.choice([name for name in _NAMES if name not in line])
        place = line.index(first) + 1
        return f"insert {new} after {first}", f"insert {new} {first}", [*line[:place], new, *line[place:]]
    rest = [name for name in line if name != first]
    return f"move {first} to {kind}", f"{kind} {first}", [first, *rest] if kind == "front" else [*rest, first]


def _programs(source: random.Random, easy: bool) -> tuple[str, str]:
    """A straight-line program and the trace of its run."""
    variable = source.choice(_VARIABLES)
    values = {variable: source.randint(1, 15)}
    prompt = [f"{variable} = {values[variable]} ;"]
    answer = list(prompt)
    for _ in range(1 if easy else source.randint(2, 3)):
        left = source.choice(list(values))
        right = source.choice(list(values)) if source.random() < 0.3 else str(source.randint(1, 9))
        first, second = values[left], values.get(right)
        second = int(right) if second is None else second
        plus = second > first or (first + second <= LARGEST_NUMBER and source.random() < 0.5)
        if plus and first + second > LARGEST_NUMBER:
            right, second = "1", 1
        variable = source.choice(_VARIABLES)
        values[variable] = first + second if plus else first - second
        sign = "+" if plus else "-"
        prompt.append(f"{variable} = {left} {sign} {right} ;")
        answer.append(f"{variable} = {first} {sign} {second} = {values[variable]} ;")
    shown = variable if source.random() < 0.7 else source.choice(list(values))
    return " ".join([*prompt, f"print {shown}"]), " ".join([*answer, f"print {values[shown]}"])
