"""Accuracy of the embedded checkpoint by plain block-wise decoding, without any cache: what training watches."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.embedded import tasks
from models.embedded.checkpoint import BLOCK, MASK_ID, decode_text, encode
from models.transformer import Params, Transformer


def predicted(model: Transformer, params: Params, tokens: jax.Array, valid: jax.Array) -> jax.Array:
    """Logits `[B, N, V]` at the positions that they predict; the first `shift` positions are predicted by nobody."""
    logits = model(params, tokens, valid)
    return jnp.pad(logits, ((0, 0), (model.shift, 0), (0, 0)))[:, : tokens.shape[1]]


@functools.partial(jax.jit, static_argnums=0)
def decode(
    model: Transformer, params: Params, tokens: jax.Array, valid: jax.Array, threshold: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Block-wise decoding without a cache: commits what is surer than `threshold`, and the surest of each row.

    Returns:
      answers `[B, G]` and the number of forward passes. A threshold above 1 commits one token per step.
    """
    place = jnp.arange(tokens.shape[1]) - tasks.PROMPT_LENGTH
    tokens = jnp.where(place >= 0, MASK_ID, tokens)

    def commit(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens, steps = carry
        masked = (tokens == MASK_ID) & (place >= 0)
        block = jnp.min(jnp.where(masked, place // BLOCK, place.size), axis=1, keepdims=True)
        probabilities = jax.nn.softmax(predicted(model, params, tokens, valid).at[..., MASK_ID].set(-jnp.inf))
        sure = jnp.where(masked & (place // BLOCK == block), probabilities.max(axis=-1), -1.0)
        chosen = (sure > threshold) | ((sure == sure.max(axis=1, keepdims=True)) & (sure >= 0))
        return jnp.where(chosen, probabilities.argmax(axis=-1), tokens), steps + 1

    is_masked = lambda carry: jnp.any((carry[0] == MASK_ID) & (place >= 0))
    tokens, steps = jax.lax.while_loop(is_masked, commit, (tokens, jnp.int32(0)))
    return tokens[:, tasks.PROMPT_LENGTH :], steps


def evaluate(
    model: Transformer, params: Params, items: Sequence[tasks.Item], threshold: float, batch: int = 64
) -> dict[str, float]:
    """Share of right final answers per task, and forward passes per batch of `batch` items."""
    right: dict[str, list[bool]] = {}
    passes = []
    for start in range(0, len(items), batch):
        part = list(items[start : start + batch])
        tokens, valid = encode(part + part[:1] * (batch - len(part)))
        answers, steps = decode(model, params, tokens, valid, jnp.float32(threshold))
        passes.append(int(steps))
        for item, answer in zip(part, np.asarray(answers), strict=False):
            right.setdefault(item.task, []).append(tasks.is_correct(item, decode_text(answer)))
    accuracy = {task: round(float(np.mean(flags)), 4) for task, flags in right.items()}
    return accuracy | {"forwards": float(np.mean(passes))}
