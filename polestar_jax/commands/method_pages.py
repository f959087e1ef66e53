"""What cards, fields and presets say of a method: the pages of `polestar methods`, and a part of docs/methods.md."""

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

from polestar_jax.commands.method_arguments import field_readers
from polestar_jax.methods import CARDS, METHODS

BEGIN = "<!-- begin: polestar methods --write docs/methods.md -->"
END = "<!-- end -->"


def summary_of(name: str) -> str:
    """The first line of the method's file."""
    return _line(sys.modules[METHODS[name].__module__])


def source_of(name: str) -> tuple[str, str]:
    """Where a method was published: in words, and its address."""
    kind, _, number = CARDS[name].paper.rpartition(" ")
    if kind == "OpenReview":
        return CARDS[name].paper, f"https://openreview.net/forum?id={number}"
    return f"arXiv {number}", f"https://arxiv.org/abs/{number}"


def presets_of(name: str) -> Mapping[str, Mapping[str, Any]]:
    """The fields that each preset of a method sets; empty if it has no presets."""
    return getattr(sys.modules[METHODS[name].__module__], "PRESETS", {})


def defaults_of(name: str) -> dict[str, Any]:
    """Every field of a method that can be set on the command line, with its default."""
    parameters, parts = inspect.signature(METHODS[name]).parameters, _parts_of(name)
    default = lambda field: parameters[field].default if field in parameters else getattr(parts[field], field)
    return {field: default(field) for field in field_readers(name)}


def explanations_of(name: str) -> dict[str, str]:
    """What docstrings say of the fields, by field."""
    found: dict[str, str] = {}
    for documented in (*map(type, _parts_of(name).values()), METHODS[name]):
        found |= _explained(inspect.getdoc(documented) or "")
    return found


def write_value(value: Any) -> str:
    """A value as `field=value` takes it."""
    if isinstance(value, tuple):
        return ",".join(map(write_value, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def card_lines(name: str) -> dict[str, str]:
    """A method's card, by heading."""
    card = CARDS[name]
    kinds = "; ".join(f"`{kind}` {rows}" for kind, rows in card.rows.items())
    return {
        "reuses": card.reuses,
        "refreshes": card.refreshes,
        "commits": card.commits,
        "state": card.state,
        "rows of a forward": kinds,
        "work beside the rows": card.extra,
        "twin": card.twin,
    }


def markdown_of(name: str) -> str:
    """A method's section of docs/methods.md."""
    words, address = source_of(name)
    lines = [
        f"### {name}: {CARDS[name].title}",
        "",
        f"[{words}]({address}), [methods/{name}.py](../polestar_jax/methods/{name}.py)",
        "",
        *(f"* {heading}: {text}" for heading, text in card_lines(name).items()),
    ]
    if presets := presets_of(name):
        lines.append(f"* presets: {'; '.join(_settings(preset, presets[preset]) for preset in presets)}")
    fields = ", ".join(f"`{field}={write_value(value)}`" for field, value in defaults_of(name).items())
    return "\n".join([*lines, f"* fields: {fields}"])


def markdown() -> str:
    """The generated part of docs/methods.md: every method in order of publication, between its two marker comments."""
    return "\n\n".join([BEGIN, *map(markdown_of, METHODS), END])


def replace_part(text: str) -> str:
    """A page with its generated part made anew.

    Raises:
      ValueError: if the page has no such part.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"the page must have the lines {BEGIN} and {END} once each, in this order")
    return text[: text.index(BEGIN)] + markdown() + text[text.index(END) + len(END) :]


def _parts_of(name: str) -> dict[str, Any]:
    """The parts that hold those of a method's fields that its function does not name, by field."""
    method = METHODS[name]()
    fields = getattr(sys.modules[METHODS[name].__module__], "FIELDS", {})
    return {field: getattr(method, part) for field, part in fields.items()}


def _line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _explained(text: str) -> dict[str, str]:
    """The entries "name, name: words" of a docstring's Args or Attributes, by name."""
    section = re.search(r"^(?:Args|Attributes):\n((?:  .*(?:\n|$))+)", text, re.MULTILINE)
    entries = re.split(r"\n(?=  \S)", section[1].rstrip()) if section else []
    split = [entry.partition(":") for entry in entries]
    return {name.strip(): " ".join(words.split()) for names, _, words in split for name in names.split(",")}


def _settings(preset: str, fields: Mapping[str, Any]) -> str:
    values = ", ".join(f"{field}={write_value(value)}" for field, value in fields.items())
    return f"`{preset}` ({values or 'the defaults'})"
