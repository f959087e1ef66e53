"""Decodes held-out exercises with one method in batches: accuracy and counts, no times."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from polestar_jax import make_decode, pad_prompts
from polestar_jax.metrics import before_eos, binomial_error, concatenate, measure
from polestar_jax.types import DecodeOutput, Method, Model

BATCH = 50


def first_rows(output: DecodeOutput, count: int) -> DecodeOutput:
    """The first `count` batch rows of an output; the others fill up a batch."""
    return jax.tree.map(lambda leaf: leaf[:count], output)


def measure_method(
    model: Model, params: Any, tokenizer: Any, method: Method, items: Sequence[Any], gen_length: int, seed: int
) -> dict[str, Any]:
    """Accuracy, TPF and rows of a method over exercises of `models.embedded.tasks`.

    A batch equals its rows decoded alone (contract 1), so that only times would differ from one item after the other.
    """
    from models.embedded import tasks

    decode = make_decode(model, method, gen_length=gen_length)
    width = min(BATCH, len(items))
    ids = [tokenizer.encode(item.prompt) for item in items]
    length = max(tasks.PROMPT_LENGTH, *map(len, ids))
    correct, counts = [], []
    state = decode.init(jax.random.split(jax.random.key(seed), width), length)
    for start in range(0, len(items), width):
        part = ids[start : start + width]
        prompt = pad_prompts(part + part[:1] * (width - len(part)), length)
        output, state = decode(params, state, prompt)
        output = first_rows(jax.device_get(output), len(part))
        counts.append(measure(output, eos_id=model.config.eos_id, kinds=decode.kinds))
        for item, row in zip(items[start : start + width], output.tokens, strict=False):
            text = tokenizer.decode(before_eos(row, model.config.eos_id).tolist(), skip_special_tokens=False)
            correct.append(tasks.is_correct(item, text))
    metrics = concatenate(counts)
    accuracy, forwards = float(np.mean(correct)), float(metrics.forwards.sum())
    return {
        "accuracy": accuracy,
        "accuracy_error": binomial_error(accuracy, len(items)),
        "tpf": float(metrics.tokens.sum()) / forwards,
        "positions_per_forward": float(metrics.positions.sum()) / forwards,
        "forwards": forwards / len(items),
        "rows_per_forward": float(metrics.rows.sum()) / forwards,
        "rows": float(metrics.rows.sum()) / len(items),
        "refreshes": float(metrics.refreshes.sum()) / len(items),
        "kinds": {name: float(count.mean()) for name, count in metrics.kinds.items()},
        "commits": {name: float(count.mean()) for name, count in metrics.commits.items()},
        "correct": [bool(each) for each in correct],
    }
