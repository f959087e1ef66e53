"""Prompts: left-padding ragged ones, and refusing bad ones before anything is compiled."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from polestar_jax.types import NOTHING, Canvas, Prompt, Spec


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
    return Prompt(tokens.astype(jnp.int32), valid, prompt.embeddings, _check_forced(spec, prompt.forced))


def _check_forced(spec: Spec, forced: jax.Array | None) -> jax.Array | None:
    if forced is None:
        return None
    expected = (spec.batch, spec.gen_length)
    if forced.shape != expected or not jnp.issubdtype(forced.dtype, jnp.integer):
        raise ValueError(
            f"forced tokens must be integers of shape {expected}, {NOTHING} where the generation is free, not"
            f" {forced.dtype}{list(forced.shape)}"
        )
    if not isinstance(forced, Tracer):
        values, vocab_size = np.asarray(forced), spec.model.config.vocab_size
        outside = (values != NOTHING) & ((values < 0) | (values >= vocab_size))
        if outside.any():
            row, place = np.argwhere(outside)[0]
            raise ValueError(
                f"forced token {values[row, place]} (row {row}, generated position {place}) is outside the vocabulary"
                f" of {vocab_size} ids; {NOTHING} leaves a position free"
            )
    return forced.astype(jnp.int32)


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
    """The prompt followed by G masks, or by the tokens that are forced."""
    forced = jnp.full((spec.batch, spec.gen_length), NOTHING) if prompt.forced is None else prompt.forced
    free = forced == NOTHING
    join = lambda head, tail: jnp.concatenate([head, tail.astype(head.dtype)], axis=1)
    valid = join(prompt.valid, jnp.ones_like(free))
    return Canvas(
        tokens=join(prompt.tokens.astype(jnp.int32), jnp.where(free, spec.model.config.mask_id, forced)),
        masked=join(jnp.zeros_like(prompt.valid), free),
        valid=valid,
        position=jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0),
        embeddings=prompt.embeddings,
    )
