"""From last-layer outputs to predictions: logits, the token at each position and its confidence (paper eq. 1)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from polestar_jax.attention import CHUNK
from polestar_jax.kernels import choose_words
from polestar_jax.rows import iota
from polestar_jax.types import Canvas, Pass, Prediction, Sampler, Signal, Spec, pytree, static


def _margin(logits: jax.Array, token: jax.Array) -> jax.Array:
    top, _ = jax.lax.top_k(jax.nn.softmax(logits), 2)
    return top[..., 0] - top[..., 1]


def _entropy(logits: jax.Array, token: jax.Array) -> jax.Array:
    log_probability = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_probability) * log_probability, axis=-1)


def _gap(logits: jax.Array, token: jax.Array) -> jax.Array:
    top, _ = jax.lax.top_k(logits, 2)
    return top[..., 0] - top[..., 1]


SIGNALS: dict[Signal, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "margin": _margin,
    "entropy": _entropy,
    "gap": _gap,
    "logits": lambda logits, token: logits,
}
"""Signals that any cache policy can serve, because they come from the logits `[B, R, V]` alone."""


@pytree
class Greedy:
    """The most likely token, [MASK] excluded as in eq. 1.

    Attributes:
      allow_mask: let [MASK] win, as the authors' release does. A position where it does stays masked, so that forwards
        may commit nothing and a decode may end with positions that are not `filled`.
    """

    allow_mask: bool = static(default=False)

    def problems(self, spec: Spec) -> list[str]:
        return []

    def adjust(self, spec: Spec, logits: jax.Array) -> jax.Array:
        return logits

    def sample(self, spec: Spec, logits: jax.Array, slot: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Token int32 `[B, R]` and its float32 softmax probability, [MASK] counted in the denominator."""
        return choose(spec, logits, logits, self.allow_mask)


@pytree
class Gumbel:
    """LLaDA's sampling: the arg max of logits + temperature * Gumbel noise; the confidence is that of the clean logits.

    Attributes:
      temperature: 0 is greedy.
    """

    temperature: float

    def problems(self, spec: Spec) -> list[str]:
        return [] if self.temperature >= 0 else [f"temperature={self.temperature} must be at least 0"]

    def adjust(self, spec: Spec, logits: jax.Array) -> jax.Array:
        return logits

    def sample(self, spec: Spec, logits: jax.Array, slot: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `Greedy.sample`; noise is drawn from the row's key and the generated position: no neighbour changes it."""
        return choose(spec, logits, logits + self.temperature * gumbel_noise(spec, logits, slot, keys), False)


def gumbel_noise(spec: Spec, logits: jax.Array, slot: jax.Array, keys: jax.Array) -> jax.Array:
    """float32 `[B, R, V]` for the logits of the predicted slots `[B, R]`, from this forward's keys `[B]`."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, slot - spec.prompt_length)
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:])))(fold)


def choose(spec: Spec, clean: jax.Array, noisy: jax.Array, allow_mask: bool) -> tuple[jax.Array, jax.Array]:
    """The arg max of `noisy` float32 `[B, R, V]`, and the softmax probability of `clean` there."""
    if not allow_mask:
        is_mask = iota(noisy.shape[-1])[None] == spec.model.config.mask_id
        noisy = jnp.where(is_mask, -jnp.inf, noisy)
    token = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    logit = jnp.take_along_axis(clean, token[..., None], axis=-1)[..., 0]
    return token, jnp.exp(logit - jax.nn.logsumexp(clean, axis=-1))


def slot_confidence(spec: Spec, params, canvas: Canvas, hidden: jax.Array) -> jax.Array:
    """The confidence float32 `[B, N]` of the prediction for every slot, committed or not, after a whole-canvas forward.

    A slot whose logits would come from before the canvas, or from a pad, takes its own row's.

    Args:
      hidden: `[B, N, D]`, last-layer outputs.
    """
    shift, length = spec.model.shift, hidden.shape[1]
    chunks = -(-length // CHUNK)
    padded = jnp.pad(hidden, ((0, 0), (0, -length % chunks), (0, 0)))
    split = padded.reshape(hidden.shape[0], chunks, -1, hidden.shape[2]).swapaxes(0, 1)

    def confidence(rows: jax.Array) -> jax.Array:
        logits = spec.model.logits(params, rows).astype(jnp.float32)
        return choose(spec, logits, logits, False)[1]

    own = jax.lax.map(confidence, split).swapaxes(0, 1).reshape(hidden.shape[0], -1)[:, :length]
    before = iota(length) - shift
    has_predictor = (before >= 0) & jnp.take(canvas.valid, jnp.maximum(before[0], 0), axis=1)
    return jnp.where(has_predictor, jnp.roll(own, shift, axis=1), own)


def predict(spec: Spec, sampler: Sampler, guidance, params, done: Pass, keys: jax.Array) -> Prediction:
    """Runs the LM head on the rows that predict.

    Args:
      guidance: None, or the scale w: `done` then holds 2 B batch rows, conditional first, and the logits are
        unconditional + (w + 1) (conditional - unconditional), as LLaDA's sampler has it.
      done: a branch's result.
      keys: key `[B]`, this forward's.
    """
    given = (done.slot, done.valid, done.extra, done.planes or {})
    slot, valid, extra, planes = jax.tree.map(lambda leaf: leaf[: spec.batch], given)
    slot = slot + spec.model.shift
    valid = valid & (slot < spec.length)
    # Rules that look at the logits themselves need them in memory, and a sampler derived from Greedy may too.
    if guidance is None and type(sampler) is Greedy and not spec.needs & SIGNALS.keys():
        chosen = choose_words(spec, params, done.hidden, sampler.allow_mask)
        if chosen is not None:
            return Prediction(slot, valid, *chosen, extra, planes)
    logits = spec.model.logits(params, done.hidden).astype(jnp.float32)
    if guidance is not None:
        conditional, unconditional = jnp.split(logits, 2)
        logits = unconditional + (guidance + 1) * (conditional - unconditional)
    logits = sampler.adjust(spec, logits)
    token, confidence = sampler.sample(spec, logits, slot, keys)
    computed = {name: SIGNALS[name](logits, token) for name in sorted(spec.needs & SIGNALS.keys())}
    return Prediction(slot, valid, token, confidence, extra | computed, planes)
