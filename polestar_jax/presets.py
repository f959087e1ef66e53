"""Methods whose fields are those of their parts: a preset, overridden by what the user gives."""

import dataclasses
from collections.abc import Mapping
from typing import Any


def fields_of(parts: Mapping[str, type]) -> dict[str, str]:
    """Every field of the parts, `{"rule": Rule, ...}`, and the part that has it."""
    return {field.name: part for part, cls in parts.items() for field in dataclasses.fields(cls)}


def choose_fields(
    method: str,
    presets: Mapping[str, Mapping[str, Any]],
    preset: str,
    given: Mapping[str, Any],
    known: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """The fields of a preset, overridden by those `given`, by part.

    Raises:
      ValueError: naming an unknown preset or field.
    """
    if preset not in presets:
        raise ValueError(f"preset={preset!r} must be one of {', '.join(presets)}")
    if unknown := given.keys() - known.keys():
        raise ValueError(f"{method} has no field {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    chosen = {**presets[preset], **given}
    return {part: {name: chosen[name] for name in chosen if known[name] == part} for part in set(known.values())}
