"""Where a generated text ends: at its end of text, and at stop strings that are certain to stand there."""

from collections.abc import Iterable, Sequence


def first_unfilled(filled: Sequence[bool]) -> int:
    """How many tokens precede the first position that is still masked."""
    return next((place for place, is_filled in enumerate(filled) if not is_filled), len(filled))


def cut(text: str, stops: Iterable[str]) -> str:
    """The text before the first of the stop strings; empty ones are none."""
    places = [text.find(stop) for stop in stops if stop]
    return text[: min((place for place in places if place >= 0), default=len(text))]
