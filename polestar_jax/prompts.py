"""Prompts: left-padding ragged ones, and refusing bad ones before anything is compiled."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from polestar_jax.types import Canvas, Prompt, Spec


def pad_prompts(prompts: Sequence[Sequence[int]], length: int | None = None) -> Prompt:
    """Left-pads token id lists to one length.

    Args:
      prompts: B lists of token ids.
      length: P; the longest prompt if None.

    Raises:
      ValueError: if a prompt is empty or longer than `length`.
    """
    longest = max((len(prompt) for prompt in prompts), default=0)
    length = longest if length is None else length
    if longest > length:
        raise ValueError(f"a prompt has {longest} tokens, more than length={length}; raise length or cut the prompt")
    tokens = np.zeros((len(prompts), length), np.int32)
    valid = np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {row} is empty; give at least one token (for example the model's BOS id)")
        tokens[row, length - len(prompt) :] = prompt
        valid[row, length - len(prompt) :] = True
    return Prompt(jnp.asarray(tokens), jnp.asarray(valid))


def check_prompt(spec: Spec, prompt: Prompt | ArrayLike) -> Prompt:
    """A `Prompt` that fits `spec`, from a `Prompt` or int `[B, P]`.

    Raises:
      ValueError: naming the value that does not fit.
    """
    if not isinstance(prompt, Prompt):
        tokens = prompt if isinstance(prompt, jax.Array) else np.asarray(prompt)
        prompt = Prompt(jnp.asarray(tokens), jnp.ones(tokens.shape, bool))
    tokens, valid = prompt.tokens, prompt.valid
    expected = (spec.batch, spec.prompt_length)
    if tokens.shape != expected or valid.shape != expected:
        raise ValueError(
            f"the prompt has shape {tokens.shape} (valid: {valid.shape}) but the state was made for {expected};"
            " call decode.init with this batch and prompt_length, or pad with polestar_jax.pad_prompts"
        )
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"prompt tokens must be integers, not {tokens.dtype}")
    if not any(isinstance(array, Tracer) for array in (tokens, valid)):
        _check_values(spec, np.asarray(tokens), np.asarray(valid))
    return Prompt(tokens.astype(jnp.int32), valid, prompt.embeddings)


def _check_values(spec: Spec, tokens: np.ndarray, valid: np.ndarray) -> None:
    vocab_size = spec.model.config.vocab_size
    outside = valid & ((tokens < 0) | (tokens >= vocab_size))
    if outside.any():
        row, slot = np.argwhere(outside)[0]
        raise ValueError(
            f"prompt token {tokens[row, slot]} (row {row}, slot {slot}) is outside the vocabulary of {vocab_size} ids"
        )
    empty = ~valid.any(axis=1)
    if empty.any():
        raise ValueError(f"prompt row {np.argmax(empty)} holds only padding; give every row at least one valid token")
    gaps = valid[:, :-1] & ~valid[:, 1:]
    if gaps.any():
        raise ValueError(
            f"prompt row {np.argwhere(gaps)[0][0]} has padding after a token; prompts are padded on the left"
        )


def new_canvas(spec: Spec, prompt: Prompt) -> Canvas:
    """The prompt followed by G masks."""
    tail = (spec.batch, spec.gen_length)
    join = lambda head, value, dtype: jnp.concatenate([head.astype(dtype), jnp.full(tail, value, dtype)], axis=1)
    valid = join(prompt.valid, True, bool)
    return Canvas(
        tokens=join(prompt.tokens, spec.model.config.mask_id, jnp.int32),
        masked=join(jnp.zeros_like(prompt.valid), True, bool),
        valid=valid,
        position=jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0),
        embeddings=prompt.embeddings,
    )
