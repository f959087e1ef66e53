"""A commit rule that replays how many tokens each forward commits, so that methods are timed at a given parallelism."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from polestar_jax.commit import candidate_rows, commit_rows, rank, reasons
from polestar_jax.types import Canvas, Method, Prediction, Scope, Signal, Spec, pytree, static


@pytree
class Replay:
    """The `counts[i]` most confident candidates of the block at a row's i-th forward, at least one.

    Attributes:
      counts: int32 `[T]`.
      needs: signals that the replaced rule read, so that the policy goes on measuring them.
    """

    counts: jax.Array
    needs: frozenset[Signal] = static()

    revokes = False
    progresses = True

    def problems(self, spec: Spec) -> list[str]:
        return []

    def init(self, spec: Spec) -> jax.Array:
        """int32 `[B]`: forwards so far."""
        return jnp.zeros((spec.batch,), jnp.int32)

    def commit(self, spec: Spec, state: jax.Array, scope: Scope, canvas: Canvas, prediction: Prediction):
        count = jnp.maximum(jnp.take(self.counts, state, mode="clip"), 1)
        eligible = candidate_rows(scope, prediction)
        chosen = eligible & (rank(prediction.confidence, eligible) < count[:, None])
        return state + 1, commit_rows(prediction, reasons(forced=chosen), spec.length)


def replay(method: Method, counts: np.ndarray) -> Method:
    """`method` with its commits replaced by `counts` `[T]`; its cache policy and schedule stay."""
    return dataclasses.replace(method, rule=Replay(jnp.asarray(counts, jnp.int32), method.rule.needs))


def draw_counts(mean: float, forwards: int, seed: int) -> np.ndarray:
    """int64 `[forwards]` commits per forward, geometric with this mean; 1 for a mean of 1."""
    return np.random.default_rng(seed).geometric(1 / mean, size=forwards)


def count_forwards(counts: np.ndarray, gen_length: int, block_length: int) -> int:
    """Forwards that a semi-autoregressive decode of `counts` takes: a block's last forward commits what is left."""
    forwards = 0
    for _ in range(gen_length // block_length):
        left = block_length
        while left > 0:
            left -= max(int(counts[min(forwards, len(counts) - 1)]), 1)
            forwards += 1
    return forwards
