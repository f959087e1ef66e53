"""The decodes that are studied: held-out prompts of one length, and a method whose cache ages."""

import statistics
from typing import Any

from polestar_jax import methods
from polestar_jax.types import Method


def pick_prompts(tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """Up to `count` held-out prompts of the embedded exercises, as ids.

    All have the commonest length: a trace has no pads, and prompts of one length share programs.
    """
    from models.embedded import tasks

    encoded = [tokenizer.encode(item.prompt) for item in tasks.make_items("heldout", 12 * count, seed)]
    length = statistics.mode(map(len, encoded))
    return [ids for ids in encoded if len(ids) == length][:count]


def cached_method(block_length: int) -> Method:
    """Fast-dLLM with one token per forward: nothing outside the block is computed between two entries."""
    return methods.fast_dllm(threshold=2.0, block_length=block_length)  # no confidence reaches 2
