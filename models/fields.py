"""Checks of a Hugging Face `config.json`, shared by the model families."""

import dataclasses
from collections.abc import Mapping
from typing import Any

DTYPES = ("float32", "bfloat16")

_GENERIC = {
    "bad_words_ids": None, "begin_suppress_tokens": None, "chunk_size_feed_forward": 0, "diversity_penalty": 0.0,
    "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0,
    "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
    "num_return_sequences": 1, "pretraining_tp": 1, "repetition_penalty": 1.0, "return_dict": True, "temperature": 1.0,
    "top_k": 50, "top_p": 1.0, "typical_p": 1.0,
}  # fmt: skip
"""Fields that transformers writes for any model when told to write all of them, with its defaults. Those that are null,
false or empty by default need no mention: any unknown field may be off."""


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
            elif name in self.used or name in self.optional or name in self.ignored or _is_off(name, value):
                continue
            elif name in _GENERIC:
                found.append(f"{name}={value!r} is not supported (only its default {_GENERIC[name]!r})")
            else:
                found.append(f"{name}={value!r} is not a known field of a {self.title} config")
        if dtype not in DTYPES:
            found.append(f"dtype={dtype!r} must be 'float32' or 'bfloat16'")
        return found

    def check(self, problems: list[str]) -> None:
        """Raises `ValueError` with all `problems`, if there are any."""
        if problems:
            raise ValueError(f"config.json cannot be read as {self.title}: " + "; ".join(problems))


def _is_off(name: str, value: Any) -> bool:
    """Whether an unknown field says nothing: null, false, empty, or the default of a generic field."""
    return value is None or value is False or value in ({}, []) or (name in _GENERIC and value == _GENERIC[name])


def head_problems(
    fields: Mapping[str, Any], model_size: str, heads: str, kv_heads: str, kv_value: int | None
) -> list[str]:
    """The line about heads that do not divide the model size, or key heads that do not divide the heads."""
    size, count = fields[model_size], fields[heads]
    if size % (2 * count) or count % (kv_value or count):
        return [f"{heads}={count} must split {model_size}={size} into even heads, and {kv_heads}={kv_value}"]
    return []
