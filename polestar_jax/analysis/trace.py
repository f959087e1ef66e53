"""Traces: what a full forward sees at every step of a decode, and how stale the decode's own cache is."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polestar_jax import make_decode, pad_prompts
from polestar_jax.attention import attention_scores, weigh_values
from polestar_jax.types import Method, Model


class Look(NamedTuple):
    """One full forward over a canvas.

    Attributes:
      attention: log attention, float32 `[L, H, N, N]`.
      keys, values: `[L, Hkv, N, A]`, keys rotated.
      log_probability: at the positions that the rows predict, `[N, V]`.
    """

    attention: jax.Array
    keys: jax.Array
    values: jax.Array
    log_probability: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def look(model: Model, params: Any, tokens: jax.Array) -> Look:
    """A full forward over int32 `[N]` tokens without pads, everything kept: for small models."""
    position = jnp.arange(tokens.size, dtype=jnp.int32)[None]
    everyone = jnp.ones(position.shape, bool)
    hidden = model.embed(params, tokens[None])
    attention, keys, values = [], [], []
    for layer in range(model.config.layers):
        query, key, value = model.project(params, layer, hidden)
        query, key = model.rotate(query, position), model.rotate(key, position)
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        log_attention = jax.nn.log_softmax(attention_scores(query, key, everyone), axis=-1)
        hidden = model.finish(params, layer, hidden, weigh_values(jnp.exp(log_attention), value))
        attention.append(log_attention[0])
        keys.append(key[0])
        values.append(value[0])
    logits = model.logits(params, hidden)[0].astype(jnp.float32)
    predicted = jnp.pad(logits, ((model.shift, 0), (0, 0)))[: tokens.size]
    return Look(jnp.stack(attention), jnp.stack(keys), jnp.stack(values), jax.nn.log_softmax(predicted))


class Trace(NamedTuple):
    """A decode step by step; T forwards, N positions, L layers, everything in NumPy.

    Attributes:
      prompt_length, block_length: P, S.
      shift: distance from a row to the position that it predicts; `drift` and `values` are by row.
      tokens: int `[T + 1, N]`, before every forward, and in the end.
      masked: bool `[T + 1, N]`.
      start: int `[T]`, the block's first position.
      entering: bool `[T]`.
      kind: names of the forwards.
      drift: `[T, L, N]`, eq. 4: KL of a position's attention from the step before, mean over heads; NaN at first.
      drift_since_entry: the same from the block's entry, `[T, L, N]`.
      anchor_change: `[T, L, N]`, 1 - cosine of the attention of each position's most attended token since the entry.
      staleness: `[T, L, N]`, section C.2: cached against recomputed keys and values; NaN where nothing is cached.
      log_probability: `[T, N, V]`.
      values: the last layer's, `[T, N, Hkv * A]`.
    """

    prompt_length: int
    block_length: int
    shift: int
    tokens: np.ndarray
    masked: np.ndarray
    start: np.ndarray
    entering: np.ndarray
    kind: list[str]
    drift: np.ndarray
    drift_since_entry: np.ndarray
    anchor_change: np.ndarray
    staleness: np.ndarray
    log_probability: np.ndarray
    values: np.ndarray

    @property
    def committed(self) -> np.ndarray:
        """bool `[T, N]`: written by that forward."""
        return self.masked[:-1] & ~self.masked[1:]

    @property
    def confidence(self) -> np.ndarray:
        """`[T, N]`: probability of the likeliest token."""
        return np.exp(self.log_probability.max(axis=-1))


@jax.jit
def _divergence(now: jax.Array, before: jax.Array) -> jax.Array:
    """KL of log distributions `[L, H, N, N]`, clamped at 0, mean over heads: `[L, N]`."""
    return jnp.maximum(jnp.sum(jnp.exp(now) * (now - before), axis=-1), 0.0).mean(axis=1)


def _cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.sum(a * b, axis=-1) / jnp.maximum(norms, 1e-12)


@jax.jit
def _anchor_change(now: jax.Array, entry: jax.Array) -> jax.Array:
    """How far the attention of every position's most attended token turned since the entry, `[L, N]`."""
    now, entry = jnp.exp(now).mean(axis=1), jnp.exp(entry).mean(axis=1)
    change = 1 - _cosine(now, entry)
    return jnp.take_along_axis(change, jnp.argmax(entry, axis=-1), axis=-1)


@jax.jit
def _staleness(cached: tuple[jax.Array, jax.Array], fresh: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Section C.2: 1 - the mean of the cosines of keys and of values, each a mean over heads; `[L, N]`."""
    keys, values = (_cosine(old, new).mean(axis=1) for old, new in zip(cached, fresh, strict=True))
    return 1 - (keys + values) / 2


def record_trace(
    model: Model,
    params: Any,
    method: Method,
    prompt: list[int],
    gen_length: int,
    seed: int = 0,
    whole_predictions: bool = True,
) -> Trace:
    """Decodes one prompt and looks at the canvas before every forward.

    Args:
      model, params: small: every layer's attention is kept as `[H, N, N]`.
      method: with blocks of fixed length; one whose cache has `keys` and `values` per layer also gets its staleness.
      prompt: token ids.
      gen_length: G.
      seed: of methods that draw.
      whole_predictions: keep probabilities of all tokens; else of the likeliest, and `log_probability` is `[T, N, 1]`.
    """
    decode = make_decode(model, method, gen_length=gen_length)
    state = decode.init(jax.random.split(jax.random.key(seed), 1), len(prompt))
    state = decode.start(state, pad_prompts([prompt]))
    block_length = decode.spec(1, len(prompt)).span
    rows: dict[str, list[Any]] = {name: [] for name in Trace._fields}
    before = entry = None
    while not bool(decode.finished(state)[0]):
        canvas = jax.device_get(state.canvas)
        seen = look(model, params, jnp.asarray(canvas.tokens[0]))
        generated = canvas.masked[0, len(prompt) :]
        start = len(prompt) + int(np.argmax(generated)) // block_length * block_length
        entering = not rows["start"] or start != rows["start"][-1]
        entry = seen.attention if entering or entry is None else entry
        nothing = np.full((model.config.layers, canvas.tokens.shape[1]), np.nan, np.float32)
        cache = state.cache
        stale = nothing
        if hasattr(cache, "keys") and not entering:
            cached = tuple(jnp.stack([layer[0] for layer in part]) for part in (cache.keys, cache.values))
            stale = _staleness(cached, (seen.keys, seen.values))
        rows["tokens"].append(canvas.tokens[0])
        rows["masked"].append(canvas.masked[0])
        rows["start"].append(start)
        rows["entering"].append(entering)
        rows["drift"].append(nothing if before is None else _divergence(seen.attention, before))
        rows["drift_since_entry"].append(_divergence(seen.attention, entry))
        rows["anchor_change"].append(_anchor_change(seen.attention, entry))
        rows["staleness"].append(stale)
        best = seen.log_probability.max(axis=-1, keepdims=True)
        rows["log_probability"].append(seen.log_probability if whole_predictions else best)
        rows["values"].append(seen.values[-1].swapaxes(0, 1).reshape(canvas.tokens.shape[1], -1))
        before = seen.attention
        state, log = decode.step(params, state)
        rows["kind"].append(decode.kinds[int(log.kind[0])])
    canvas = jax.device_get(state.canvas)
    rows["tokens"].append(canvas.tokens[0])
    rows["masked"].append(canvas.masked[0])
    kinds = rows.pop("kind")
    stacked = {name: np.stack(jax.device_get(parts)) for name, parts in rows.items() if parts}
    return Trace(len(prompt), block_length, model.shift, kind=kinds, **stacked)
