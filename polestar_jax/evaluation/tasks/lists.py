"""Waiting-line and word-list exercises in the manner of ParallelBench (arXiv 2510.04767), with exact scorers.

A line of people (letters, words) is given with one operation. `EASY` operations have one right answer: given the
prompt the answer's tokens do not depend on one another (conditional total correlation 0) and may be written in any
order at once; for `HARD` ones several answers are right, and tokens chosen independently may mix them up. ParallelBench
defines no such split: it is our choice, made by that measure. Wording and names are our own.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from polestar_jax.evaluation.tasks.rows import Row, local_dataset

FIRST = "Ada Bram Cleo Dara Emil Faye Gus Hana Ivo June Kofi Lena Milo Nora Otis Pia Rhea Sami Tess Uri Vera Wim Yara"
LAST = "Abbas Bloom Costa Doyle Ekman Fuchs Greco Hirsch Ibsen Jonas Klein Lopez Marsh Novak Olsen Price Reyes Stone"
WORDS = "apple bench cloud door ember fern glass hill iron jar kite lamp moss nest oak pond quilt river sand tree"
POOLS: dict[str, Sequence[str]] = {
    "people": [f"{first} {last}" for first in FIRST.split() for last in LAST.split()],
    "letters": [chr(65 + number) for number in range(26)],
    "words": WORDS.split(),
}


class Operation(NamedTuple):
    """What is asked of a list.

    Attributes:
      ask: the sentence, with `{word}` and `{index}`; positions count from 0.
      free: whether several answers are right.
      apply: a right answer, from the list, a word that is not in it, an index, and a source of randomness.
    """

    ask: str
    free: bool
    apply: Callable[[list[str], str, int, random.Random], list[str]]


def _shuffled(items: list[str], word: str, index: int, source: random.Random) -> list[str]:
    mixed = list(items)
    while mixed == items:
        source.shuffle(mixed)
    return mixed


_insert = lambda items, word, index, source: [*items[:index], word, *items[index:]]
_remove = lambda items, word, index, source: [*items[:index], *items[index + 1 :]]
_replace = lambda items, word, index, source: [*items[:index], word, *items[index + 1 :]]

OPERATIONS = {
    "copy": Operation("Leave the line as it is", False, lambda items, word, index, source: list(items)),
    "reverse": Operation("Turn the line around, last one first", False, lambda items, *_: items[::-1]),
    "sort": Operation("Put the line in alphabetical order", False, lambda items, *_: sorted(items)),
    "insert_index": Operation("Let {word} join at position {index}", False, _insert),
    "remove_index": Operation("Send away whoever is at position {index}", False, _remove),
    "replace_index": Operation("Put {word} in the place of whoever is at position {index}", False, _replace),
    "shuffle": Operation("Mix the line into a different order", True, _shuffled),
    "insert_random": Operation("Let {word} join at any position you like", True, _insert),
    "remove_random": Operation("Send away any one of them", True, _remove),
    "replace_random": Operation("Put {word} in the place of any one of them", True, _replace),
}
EASY = tuple(name for name, operation in OPERATIONS.items() if not operation.free)
HARD = tuple(name for name, operation in OPERATIONS.items() if operation.free)


def make_rows(
    operation: str, count: int, seed: int, pool: str = "people", sizes: tuple[int, int] = (3, 6)
) -> list[Row]:
    """Exercises with a worked example each, from their number and the seed alone.

    Args:
      operation: a key of `OPERATIONS`.
      count: rows.
      pool: a key of `POOLS`.
      sizes: least and greatest length of a list.
    """
    for name, key, known in (("operation", operation, OPERATIONS), ("pool", pool, POOLS)):
        if key not in known:
            raise ValueError(f"{name}={key!r} must be one of {', '.join(known)}")
    least, most = sizes
    if not 2 <= least <= most < len(POOLS[pool]):
        raise ValueError(f"sizes={sizes} must be 2 <= least <= greatest < {len(POOLS[pool])}, what the pool holds")
    rows = []
    for number in range(count):
        source = random.Random(f"{seed} {operation} {pool} {sizes} {number}")
        (example, answer), (items, _) = (_draw(operation, pool, sizes, source) for _ in range(2))
        rows.append({"operation": operation, "example": example, "example_answer": answer, **items})
    return rows


def _draw(operation: str, pool: str, sizes: tuple[int, int], source: random.Random) -> tuple[Row, str]:
    *items, word = source.sample(POOLS[pool], source.randint(*sizes) + 1)
    index = source.randrange(len(items) + (operation == "insert_index"))
    answer = OPERATIONS[operation].apply(items, word, index, source)
    return {"items": items, "word": word, "index": index}, write_list(answer)


def write_list(items: Sequence[str]) -> str:
    """A list as the exercises print it."""
    return json.dumps(list(items))


def read_list(text: str) -> list[str]:
    """The last bracketed list in a text, quotes and spaces forgiven; empty if there is none."""
    start = text.rfind("[")
    inside = text[start + 1 :].partition("]")[0] if start >= 0 else ""
    return [part for part in (each.strip().strip("\"'").strip() for each in inside.split(",")) if part]


def is_right(row: Row, answer: Sequence[str]) -> bool:
    """Whether `answer` is a right answer of the exercise."""
    items, word, index = list(row["items"]), row["word"], row["index"]
    answer, operation = list(answer), row["operation"]
    if operation == "shuffle":
        return answer != items and sorted(answer) == sorted(items)
    if operation not in HARD:
        return answer == OPERATIONS[operation].apply(items, word, index, random.Random(0))
    places = range(len(items) + (operation == "insert_random"))
    return any(answer == OPERATIONS[operation].apply(items, word, place, random.Random(0)) for place in places)


def ask(operation: str, row: Row) -> str:
    """The user's turn of an exercise."""
    task = OPERATIONS[operation].ask.format(word=row["word"], index=row["index"])
    return f"This is a waiting line. {task}. Answer with the new line only.\n{write_list(row['items'])}"


def prompt(row: Row) -> str:
    """The worked example and the question."""
    operation = row["operation"]
    return f"{ask(operation, row['example'])}\n{row['example_answer']}\n\n{ask(operation, row)}\n"


def score(doc: Row, results: Sequence[str]) -> dict[str, float]:
    answer = read_list(results[0].partition("\n\n")[0])
    strict = results[0].strip() == write_list(answer)
    right = is_right(doc, answer)
    return {"score": float(right), "score_strict": float(right and strict)}


def make_task(operation: str, count: int = 100, seed: int = 0, pool: str = "people") -> dict[str, Any]:
    """The config of one operation's task; arguments as in `make_rows`."""
    kind = "hard" if OPERATIONS[operation].free else "easy"
    return {
        "task": f"lists_{kind}_{operation}",
        "custom_dataset": local_dataset(test=make_rows(operation, count, seed, pool)),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": prompt,
        "doc_to_target": lambda doc: "",
        "target_delimiter": "",
        "process_results": score,
        "num_fewshot": 0,
        "generation_kwargs": {"until": ["\n\n"], "do_sample": False},
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("score", "score_strict")
        ],
        "metadata": {"version": 1.0},
    }
