"""What drift is measured against: the scores of an earlier look, and how parts of a look are put together.

KL(a || a') = E_a[s - s'] - (log sum exp s - log sum exp s') needs the old scores, not the old probabilities, so that
one pass over the keys suffices: what normalises the new ones is known only after it.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # the score of a masked key; finite, so that a row without any key gives numbers instead of NaN
MOST_PARTS = 24
"""To take keys in: XLA merges them in the operation that reads them, unless they are too many."""

_ALIGN = 32


class DriftReference(NamedTuple):
    """An attention distribution of every head and row.

    Attributes:
      scores: float32 `[B, H, R, M']`, `NEGATIVE` at masked keys; M' is M rounded up to a multiple of 32, as kernels
        copy them.
      log_sum: float32 `[B, H, R]`, the log of the sum of their exponentials.
    """

    scores: jax.Array
    log_sum: jax.Array

    @classmethod
    def empty(cls, batch: int, heads: int, rows: int, keys: int) -> "DriftReference":
        """Room for one, which says nothing: the first drift against it is not to be read."""
        scores = jnp.zeros((batch, heads, rows, room(keys)), jnp.float32)
        return cls(scores, jnp.zeros((batch, heads, rows), jnp.float32))


def room(keys: int) -> int:
    """M' of M."""
    return -(-keys // _ALIGN) * _ALIGN


def pad_keys(scores: jax.Array) -> jax.Array:
    """Scores `[..., M]` with room for M' keys."""
    keys = scores.shape[-1]
    pad = [(0, 0)] * (scores.ndim - 1) + [(0, room(keys) - keys)]
    return jnp.pad(scores, pad, constant_values=NEGATIVE)


def mean_drift(expected: jax.Array, log_sum: jax.Array, old_log_sum: jax.Array) -> jax.Array:
    """KL per head from E_a[s - s'] and both log sums `[B, H, R]`, clamped at 0, mean over heads: `[B, R]`."""
    return jnp.maximum(expected - (log_sum - old_log_sum), 0.0).mean(axis=1)


def split_keys(tiles: int, wanted: int, most: int = MOST_PARTS) -> tuple[int, int]:
    """In how many parts to take the keys, at most `wanted` and `most`, and how many of their `tiles` go in each."""
    steps = -(-tiles // min(tiles, max(1, wanted), most))
    return -(-tiles // steps), steps


def group_queries(query: jax.Array, kv_heads: int) -> jax.Array:
    """Queries `[B, R, H, A]` by the key head that they look at, `[B * Hkv, H / Hkv * R, A]`."""
    batch, rows, heads, size = query.shape
    grouped = query.reshape(batch, rows, kv_heads, -1, size).transpose(0, 2, 3, 1, 4)
    return grouped.reshape(batch * kv_heads, heads // kv_heads * rows, size)


def put_together(
    scores: jax.Array, stats: list[jax.Array], old: DriftReference
) -> tuple[list[jax.Array], jax.Array, DriftReference]:
    """Merges what a kernel found in parts P of the keys.

    Args:
      scores: new ones, in the order of `old.scores`.
      stats: of each part, float32 `[P, planes, rows']` with at least the rows of a plane (a key-value head of a
        sequence): the scores' maximum m, the sum of exp(s - m), and that of exp(s - m) (s - s').
      old: the reference that s' is of.

    Returns:
      weights of the parts' sums over values, as `part_weights` has them; the drift `[B, R]`; the new reference.
    """
    largest, total, moved = stats
    weights, log_sum = part_weights(largest, total)
    flat = old.log_sum.size // log_sum.shape[0]
    per_row = lambda stat: stat[:, :flat].reshape(old.log_sum.shape)
    expected = _weighted(weights, moved)
    drift = mean_drift(per_row(expected), per_row(log_sum), old.log_sum)
    return weights, drift, DriftReference(scores.reshape(old.scores.shape), per_row(log_sum))


def part_weights(largest: jax.Array, total: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Weights of the parts' sums over values, P of `[planes, rows']`, and the log-sum-exp of all `[planes, rows']`.

    Parts are few and counted out one by one, never as an axis to reduce over: XLA then merges them within the
    operation that reads them.
    """
    top = functools.reduce(jnp.maximum, list(largest))
    factors = [jnp.exp(part - top) for part in largest]
    whole = _weighted(factors, total)
    return [factor / whole for factor in factors], top + jnp.log(whole)


def join_values(weights: list[jax.Array], sums: jax.Array, query: jax.Array, value: jax.Array) -> jax.Array:
    """Attended values in the form of `query` `[B, R, H, A]`, from the parts' `sums` `[P, planes, rows', A]`."""
    batch, rows, heads, size = query.shape
    kv_heads = value.shape[1]
    whole = _weighted([weight[..., None] for weight in weights], sums)
    whole = whole[:, : heads // kv_heads * rows].reshape(batch, kv_heads, -1, rows, size)
    return whole.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(value.dtype)


def _weighted(weights: list[jax.Array], parts: jax.Array) -> jax.Array:
    return functools.reduce(operator.add, [weight * part for weight, part in zip(weights, parts, strict=True)])
