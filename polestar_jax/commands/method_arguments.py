"""Methods as words: `name[:preset][:field=value...]`, with the fields of the method's own function.

Two of them joined by "+" are the cache of the first under the commit rule of the second.
"""

import dataclasses
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from polestar_jax.composition import combine
from polestar_jax.methods import METHODS
from polestar_jax.types import Method

if TYPE_CHECKING:
    from polestar_jax.tokenizer import Tokenizer

SYNTAX = "NAME[:PRESET][:FIELD=VALUE...][+NAME...]"


@dataclasses.dataclass(frozen=True)
class MethodChoice:
    """A method as the user asked for it.

    Attributes:
      name: a key of `METHODS`.
      preset: of the method's, or None for its default.
      settings: values by field.
      label: the words that ask for it, for tables.
    """

    name: str
    preset: str | None
    settings: dict[str, Any]
    label: str

    def build(self, block_length: int, tokenizer: "Tokenizer | None" = None) -> Method:
        """The method with blocks of `block_length` and delimiters of the tokenizer, if it has such."""
        function = METHODS[self.name]
        defaults: dict[str, Any] = {"block_length": block_length}
        if self.preset is not None:
            defaults["preset"] = self.preset
        elif tokenizer is not None and tokenizer.delimiters:
            defaults["delimiters"] = tokenizer.delimiters
        known = inspect.signature(function).parameters
        return function(**{name: defaults[name] for name in defaults if name in known} | self.settings)


@dataclasses.dataclass(frozen=True)
class CombinedChoice:
    """The cache of one method under the commit rule of another; see `polestar_jax.composition`."""

    cache_from: MethodChoice
    rule_from: MethodChoice

    @property
    def name(self) -> str:
        return f"{self.cache_from.name}+{self.rule_from.name}"

    @property
    def label(self) -> str:
        return f"{self.cache_from.label}+{self.rule_from.label}"

    def build(self, block_length: int, tokenizer: "Tokenizer | None" = None) -> Method:
        return combine(*(part.build(block_length, tokenizer) for part in (self.cache_from, self.rule_from)))


Choice = MethodChoice | CombinedChoice


def parse_method(text: str, settings: Sequence[str] = ()) -> Choice:
    """Reads one method, or two joined by "+".

    Args:
      text: `name[:preset][:field=value...]`, or two of these joined by "+".
      settings: more `field=value`; of two methods, for the one that has the field.

    Raises:
      ValueError: naming the method, preset, field or value that is wrong, and what is accepted.
    """
    # A plus before anything but a name belongs to a number, such as tau=1e+3 or tau=+inf.
    words = re.split(r"(?<![=,])\+(?=\s*[A-Za-z_])", text)
    if len(words) == 1:
        return _parse_single(text, settings)
    if len(words) > 2:
        raise ValueError(f"{text!r} joins {len(words)} methods; a cache and a commit rule come from two")
    names = [word.strip().split(":")[0] for word in words]
    own: list[list[str]] = [[], []]
    for setting in settings:
        field = setting.partition("=")[0].strip()
        having = [place for place, name in enumerate(names) if name in METHODS and field in field_readers(name)]
        if len(having) != 1:
            who = f"both {' and '.join(names)} have" if having else f"neither {' nor '.join(names)} has"
            raise ValueError(f"{who} the field {field!r}; write {setting} after the method's own name")
        own[having[0]].append(setting)
    return CombinedChoice(*(_parse_single(word, own[place]) for place, word in enumerate(words)))


def _parse_single(text: str, settings: Sequence[str]) -> MethodChoice:
    name, *rest = text.strip().split(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    presets = getattr(sys.modules[METHODS[name].__module__], "PRESETS", {})
    preset = None
    if rest and "=" not in rest[0]:
        preset = rest.pop(0)
        if preset not in presets:
            known = f"its presets are {', '.join(presets)}" if presets else "it has none"
            raise ValueError(f"{name} has no preset {preset!r}; {known}")
    fields = field_readers(name)
    assignments = [*rest, *settings]
    chosen = dict(_parse_assignment(name, fields, assignment) for assignment in assignments)
    return MethodChoice(name, preset, chosen, ":".join([name, *([preset] if preset else []), *assignments]))


def parse_methods(text: str) -> list[Choice]:
    """Reads several methods, separated by commas; "all" is every method with its defaults."""
    if text.strip() == "all":
        return [_parse_single(name, ()) for name in METHODS]
    # A comma before anything but a name belongs to a value, such as capacities=0.5,1.0.
    choices = [parse_method(word) for word in re.split(r",(?=\s*[A-Za-z_])", text)]
    labels = [choice.label for choice in choices]
    if repeated := {label for label in labels if labels.count(label) > 1}:
        raise ValueError(f"{', '.join(sorted(repeated))} is named twice in {text!r}")
    return choices


class Reader(NamedTuple):
    """How the values of a field are written: in words for people, and a function that raises ValueError."""

    accepts: str
    read: Callable[[str], Any]


def field_readers(name: str) -> dict[str, Reader]:
    """The fields of a method that can be set on the command line."""
    function = METHODS[name]
    parameters = inspect.signature(function).parameters
    hints = typing.get_type_hints(function)
    annotations = {
        parameter: hints[parameter]
        for parameter, details in parameters.items()
        if details.kind is inspect.Parameter.KEYWORD_ONLY and parameter != "block_length"
    }
    if any(details.kind is inspect.Parameter.VAR_KEYWORD for details in parameters.values()):
        # The rest are fields of the method's parts, under the names its module lists.
        method = function()
        parts = sys.modules[function.__module__].FIELDS
        annotations |= {
            field: typing.get_type_hints(type(getattr(method, part)))[field] for field, part in parts.items()
        }
    readers = {field: _reader(annotation) for field, annotation in annotations.items()}
    return {field: reader for field, reader in readers.items() if reader is not None}


def describe_method(method: Method) -> dict[str, Any]:
    """Every part of a method with every value, its defaults included, ready for JSON."""
    return {name: _plain(getattr(method, name)) for name in ("cache", "rule", "schedule", "sampler", "guidance")}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__} | fields
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _parse_assignment(name: str, fields: dict[str, Reader], assignment: str) -> tuple[str, Any]:
    field, equals, text = (part.strip() for part in assignment.partition("="))
    if not equals:
        raise ValueError(f"{assignment!r} is not field=value; the fields of {name} are {', '.join(fields)}")
    if field not in fields:
        raise ValueError(f"{name} has no field {field!r}; its fields are {', '.join(fields)}")
    try:
        return field, fields[field].read(text)
    except ValueError:
        raise ValueError(f"{field}={text!r} cannot be read; {field} takes {fields[field].accepts}") from None


def _reader(annotation: Any) -> Reader | None:
    """The reader of an annotation; None if its values are no matter for a command line."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in (types.UnionType, typing.Union) and types.NoneType in arguments:
        inner = _reader(next(argument for argument in arguments if argument is not types.NoneType))
        return inner and Reader(
            f"{inner.accepts} or none", lambda text: None if text.lower() == "none" else inner.read(text)
        )
    if typing.get_origin(annotation) is tuple:
        inner = _reader(arguments[0])
        return inner and Reader(
            f"{inner.accepts}, or several separated by commas",
            lambda text: tuple(inner.read(part) for part in text.split(",")),
        )
    if typing.get_origin(annotation) is Literal:
        return Reader(f"one of {', '.join(arguments)}", lambda text: arguments[arguments.index(text)])
    return _SIMPLE.get(annotation)


def _read_number(text: str) -> float:
    number = float(text)
    if math.isnan(number):
        raise ValueError("nothing compares with NaN")
    return number


_BOOLEANS = ("false", "true")
_SIMPLE = {
    bool: Reader("true or false", lambda text: bool(_BOOLEANS.index(text.lower()))),
    int: Reader("an integer", int),
    float: Reader("a number", _read_number),
    str: Reader("a word", str),
}
