"""Token representation drift: how far an attention distribution moved since the last look (eq. 4, section 4.2)."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.drift_reference import DriftReference, pad_keys
from polestar_jax.rows import iota, put_rows, take_rows
from polestar_jax.types import pytree

Floor = Literal["none", "clamp", "add"]
_TINY = 1e-12


def log_attention(scores: Float[Array, "B H R M"], mean_heads: bool) -> Float[Array, "B h R M"]:
    """Log attention distributions from scores; with `mean_heads`, of their mean over heads (h = 1, else H)."""
    log_probability = jax.nn.log_softmax(scores, axis=-1)
    if mean_heads:
        heads = scores.shape[1]
        return jax.nn.logsumexp(log_probability, axis=1, keepdims=True) - jnp.log(heads)
    return log_probability


def as_reference(log_probability: Float[Array, "B h R M"]) -> DriftReference:
    """What later drifts are measured against: log probabilities are scores whose log sum is 0."""
    return DriftReference(pad_keys(log_probability), jnp.zeros(log_probability.shape[:-1], jnp.float32))


def drift(
    now: Float[Array, "B h R M"], reference: Float[Array, "B h R M"] | DriftReference, floor: Floor = "none"
) -> Float[Array, "B R"]:
    """KL(now || reference), clamped at 0 per head, mean over heads: eq. 4.

    Args:
      now, reference: log attention distributions over the keys.
      floor: "none" is exact; "clamp" and "add" bound both by 1e-12 from below, as the authors' release does for tokens
        and for proxies.
    """
    if isinstance(reference, DriftReference):
        reference = reference.scores[..., : now.shape[-1]] - reference.log_sum[..., None]
    p = jnp.exp(now)
    if floor == "clamp":
        now, reference = jnp.maximum(now, jnp.log(_TINY)), jnp.maximum(reference, jnp.log(_TINY))
        p = jnp.exp(now)
    elif floor == "add":
        now, reference = jnp.logaddexp(now, jnp.log(_TINY)), jnp.logaddexp(reference, jnp.log(_TINY))
    divergence = jnp.sum(jnp.where(p > 0, p * (now - reference), 0.0), axis=-1)
    return jnp.maximum(divergence, 0.0).mean(axis=1)


@pytree
class History:
    """The last drifts of every position of the block, newest last.

    Attributes:
      drift: float32 `[B, S, C]`, C the room for them.
      count: int32 `[B]`, how many of them are real.
    """

    drift: jax.Array
    count: jax.Array

    @classmethod
    def empty(cls, batch: int, span: int, room: int) -> "History":
        return cls(jnp.zeros((batch, span, room), jnp.float32), jnp.zeros((batch,), jnp.int32))

    def cleared(self, where: Bool[Array, "B"]) -> "History":
        """Forgets everything in the batch rows `where`."""
        return History(self.drift, jnp.where(where, 0, self.count))


def delta(
    history: History, offset: Int[Array, "B R"], now: Float[Array, "B R"], length: Float[Array, ""] | float
) -> Float[Array, "B R"]:
    """Drift minus the mean of the position's last `length` drifts in this block; the raw drift where there are none.

    Args:
      history: of the block.
      offset: position of each row in the block.
      now: this forward's drift.
      length: h.
    """
    room = history.drift.shape[-1]
    age = room - iota(room)  # 1 for the newest
    used = (age <= length) & (age <= history.count[:, None])
    total = jnp.sum(jnp.where(used[:, None, :], history.drift, 0.0), axis=-1)
    mean = total / jnp.maximum(used.sum(axis=-1), 1)[:, None]
    return now - take_rows(mean, offset)


def extend(
    history: History,
    offset: Int[Array, "B R"],
    now: Float[Array, "B R"],
    inside: Bool[Array, "B R"],
    measured: Bool[Array, "B"],
) -> History:
    """The history with this forward's drift of the rows `inside` the block added, in batch rows that `measured` one."""
    newest = put_rows(history.drift[..., -1], offset, now, inside)
    shifted = jnp.concatenate([history.drift[..., 1:], newest[..., None]], axis=-1)
    return History(
        jnp.where(measured[:, None, None], shifted, history.drift),
        jnp.where(measured, jnp.minimum(history.count + 1, history.drift.shape[-1]), history.count),
    )
