"""Log-likelihood of a target given a prompt, estimated by masking it: LLaDA's estimator, and Dream's variant of it.

Both have the same expectation, the evidence lower bound: with S a random set of masked positions of a target of n
tokens, -log p(y | x) <= E[ n / |S| * sum over S of -log p(y_i | x, y outside S) ], |S| uniform on 1..n.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from polestar_jax.rows import forward_canvas, iota
from polestar_jax.types import Canvas, Model, Spec

_CHUNK = 8  # masked copies whose logits are alive at a time


def draw_counts(key: jax.Array, length: jax.Array, batch: int) -> jax.Array:
    """int32 `[batch]`: how many tokens each copy masks, 1..length, spread evenly from a random start (LLaDA)."""
    first = jax.random.randint(key, (), 1, length + 1)
    step = jnp.arange(batch, dtype=jnp.float32) * length / batch
    return (jnp.round(first + step).astype(jnp.int32) - 1) % length + 1


def draw_masks(key: jax.Array, length: jax.Array, room: int, batch: int, family: str) -> tuple[jax.Array, jax.Array]:
    """What every copy masks, bool `[batch, room]`, true before `length` only; the weight of its sum, `[batch]`."""
    which, how_many = jax.random.split(key)
    inside = iota(room) < length
    draw = jax.random.uniform(which, (batch, room))
    if family == "dream":
        level = (jax.random.uniform(how_many) + jnp.arange(batch) / batch) % 1.0
        return (draw < level[:, None]) & inside, 1 / jnp.maximum(level, jnp.finfo(jnp.float32).tiny)
    count = draw_counts(how_many, length, batch)
    order = jnp.argsort(jnp.argsort(jnp.where(inside, draw, jnp.inf), axis=1), axis=1)
    return order < count[:, None], length / count


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def estimate(
    model: Model, samples: int, batch: int, family: str, params, prompt: jax.Array, target: jax.Array, sizes, key
) -> tuple[jax.Array, jax.Array]:
    """Estimates log p(target | prompt).

    Args:
      model: of any family.
      samples: masked copies in all, a multiple of `batch`.
      batch: copies that share one draw of how much is masked.
      family: "llada" (|S| uniform) or "dream" (every position with a uniform probability).
      params: of the model.
      prompt: int32 `[P]`, padded on the left.
      target: int32 `[G]`, padded on the right.
      sizes: int32 `[2]`, the true lengths of both.
      key: one random key.

    Returns:
      the estimate, float32 `[]`, and the standard error of the mean over groups of `batch` copies.
    """
    spec = Spec(model, _CHUNK, prompt.size, target.size, 1, frozenset())
    valid = jnp.concatenate([iota(prompt.size)[0] >= prompt.size - sizes[0], iota(target.size)[0] < sizes[1]])
    position = jnp.maximum(jnp.cumsum(valid, dtype=jnp.int32) - 1, 0)
    tokens = jnp.concatenate([prompt, target])
    rows = prompt.size - model.shift + iota(target.size)[0]
    spread = lambda plane: jnp.broadcast_to(plane[None], (_CHUNK, spec.length))

    def losses(masked: jax.Array) -> jax.Array:
        """Sum of the losses at the masked positions of some copies, `[_CHUNK]`."""
        hidden_target = jnp.where(masked, model.config.mask_id, target[None])
        shown = jnp.concatenate([jnp.broadcast_to(prompt[None], (_CHUNK, prompt.size)), hidden_target], axis=1)
        nothing = jnp.zeros(shown.shape, bool)
        ran = forward_canvas(spec, params, Canvas(shown, nothing, spread(valid), spread(position)), spread(valid))
        logits = model.logits(params, ran.output[:, rows]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, tokens[None, prompt.size :, None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(masked, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0), axis=1)

    def group(key: jax.Array) -> jax.Array:
        masked, weight = draw_masks(key, sizes[1], target.size, batch, family)
        padded = jnp.pad(masked, ((0, -batch % _CHUNK), (0, 0)))
        summed = jax.lax.map(losses, padded.reshape(-1, _CHUNK, target.size)).reshape(-1)[:batch]
        return -jnp.mean(summed * weight)

    values = jax.lax.map(group, jax.random.split(key, samples // batch))
    spread_of_mean = jnp.std(values, ddof=1) / np.sqrt(values.size) if values.size > 1 else jnp.float32(jnp.nan)
    return values.mean(), spread_of_mean
