"""Checks of a Hugging Face `config.json`, shared by the model families."""

import dataclasses
from collections.abc import Mapping
from typing import Any

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Fields:
    """What a family's config may say; every field is used, ignored by name, or refused.

    Attributes:
      title: what messages call the family.
      used: their name of a number to ours; a number must be there.
      optional: their names of whole numbers that may be missing or null.
      fixed: their name to the values that this implementation assumes; any other would change the mathematics.
      ignored: names that change nothing here.
    """

    title: str
    used: Mapping[str, str]
    optional: tuple[str, ...]
    fixed: Mapping[str, tuple[Any, ...]]
    ignored: frozenset[str]

    def problems(self, fields: Mapping[str, Any], dtype: str) -> list[str]:
        """A line for every field that is missing, unknown, or has a value that this implementation lacks."""
        found = [f"{name} is missing" for name in self.used if fields.get(name) is None]
        for name in (*self.used, *self.optional):
            value, kind = fields.get(name), float if name in ("rope_theta", "rms_norm_eps") else int
            number = isinstance(value, (int, kind)) and not isinstance(value, bool)
            if value is not None and not (number and (value > 0 or (value == 0 and name.endswith("_id")))):
                found.append(f"{name}={value!r} must be a positive {'number' if kind is float else 'integer'}")
        for name, value in fields.items():
            if name in self.fixed:
                if value not in self.fixed[name]:
                    found.append(f"{name}={value!r} is not supported (only {self.fixed[name][0]!r})")
            elif name not in self.used and name not in self.optional and name not in self.ignored:
                found.append(f"{name}={value!r} is not a known field of a {self.title} config")
        if dtype not in DTYPES:
            found.append(f"dtype={dtype!r} must be 'float32' or 'bfloat16'")
        return found

    def check(self, problems: list[str]) -> None:
        """Raises `ValueError` with all `problems`, if there are any."""
        if problems:
            raise ValueError(f"config.json cannot be read as {self.title}: " + "; ".join(problems))


def head_problems(
    fields: Mapping[str, Any], model_size: str, heads: str, kv_heads: str, kv_value: int | None
) -> list[str]:
    """The line about heads that do not divide the model size, or key heads that do not divide the heads."""
    size, count = fields[model_size], fields[heads]
    if size % (2 * count) or count % (kv_value or count):
        return [f"{heads}={count} must split {model_size}={size} into even heads, and {kv_heads}={kv_value}"]
    return []
