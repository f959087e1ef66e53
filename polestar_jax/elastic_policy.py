"""The cache policy of Elastic-Cache (arXiv 2510.14973): layers above a boundary found in the forward are recomputed."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from polestar_jax.attention import empty_cache, head_mean
from polestar_jax.elastic_layers import layer_canvas, layer_rows, most_attended, similarity
from polestar_jax.policy import Policy
from polestar_jax.rows import (
    embed_rows,
    forward_canvas,
    iota,
    put_rows,
    replace_mine,
    rows_at,
    shift_left,
    slots_of,
    take_rows,
)
from polestar_jax.sliding_window import first_of
from polestar_jax.types import Branch, Canvas, Commits, Pass, Prediction, Scope, Spec, pytree, static

Along = Literal["keys", "heads"]


@pytree
class Tracked:
    """State of `ElasticCache`.

    Attributes:
      keys, values: rotated, per layer `[B, Hkv, N, A]`.
      inputs: per layer `[B, N, D]`, the inputs that keys and values were made of.
      tracked: int32 `[B, L, T]`, per layer the most attended decoded slots.
      fresh: bool `[B, N]`, what the last forward committed.
      started: bool `[B]`.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    inputs: tuple[jax.Array, ...]
    tracked: jax.Array
    fresh: jax.Array
    started: jax.Array


@pytree
class ElasticCache(Policy):
    """Rows up to the boundary: the window's masks, the last commits and the tracked tokens; above it, everything.

    Attributes:
      gamma: a layer whose tracked tokens attend less alike than this, as a cosine, is the last one below the boundary.
      boundary: layers from this one on are recomputed anyway.
      window: beta, how many masks are computed and predicted.
      track: T, tracked tokens per layer.
      along: the cosine is one over the keys (the paper) or over the heads (the code), then averaged.
    """

    gamma: float = 0.9
    boundary: float = float("inf")
    window: int = static(default=16)
    track: int = static(default=1)
    along: Along = static(default="keys")

    def problems(self, spec: Spec) -> list[str]:
        low = [name for name in ("window", "track") if getattr(self, name) < 1]
        found = [f"{name}={getattr(self, name)} must be at least 1" for name in low]
        if self.along not in get_args(Along):
            found.append(f"along={self.along!r} must be one of {', '.join(get_args(Along))}")
        return found

    def width(self, spec: Spec) -> int:
        return self._capacity(spec)

    def _capacity(self, spec: Spec) -> int:
        """Room for all rows that there can be: tracked tokens, a window's commits, a window and who predicts it."""
        masks = self.window * (3 if spec.model.shift else 2)
        return min(spec.length, spec.model.config.layers * self.track + masks)

    def init(self, spec: Spec) -> Tracked:
        config = spec.model.config
        plane = (spec.batch, spec.length, config.model_size)
        return Tracked(
            keys=empty_cache(spec),
            values=empty_cache(spec),
            inputs=tuple(jnp.zeros(plane, config.dtype) for _ in range(config.layers)),
            tracked=jnp.zeros((spec.batch, config.layers, self.track), jnp.int32),
            fresh=jnp.zeros((spec.batch, spec.length), bool),
            started=jnp.zeros((spec.batch,), bool),
        )

    def restart(self, spec: Spec, state: Tracked) -> Tracked:
        return dataclasses.replace(self.init(spec), keys=state.keys, values=state.values, inputs=state.inputs)

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        bind = lambda run: lambda *arguments: run(spec, *arguments)
        return Branch("elastic", bind(self._elastic)), Branch("full", bind(self._full))

    def kind(self, spec: Spec, cache: Tracked, scope: Scope) -> jax.Array:
        return (~cache.started).astype(jnp.int32)

    def observe(self, spec: Spec, cache: Tracked, scope: Scope, prediction: Prediction, commits: Commits) -> Tracked:
        return dataclasses.replace(cache, fresh=commits.write | commits.revoke, started=jnp.ones_like(cache.started))

    def _full(self, spec: Spec, params, cache: Tracked, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
        everyone = jnp.broadcast_to(iota(spec.length), canvas.tokens.shape)
        cached = (cache.keys, cache.values, mine)
        ran = forward_canvas(spec, params, canvas, scope.visible, cached=cached, kept=everyone, look=head_mean)
        window, decoded = first_of(scope.candidates, self.window), scope.visible & ~canvas.masked
        tracked = [most_attended(seen, window, decoded, self.track) for seen in ran.seen]
        inputs, tracked = replace_mine(
            mine, (cache.inputs, cache.tracked), (tuple(ran.inputs), jnp.stack(tracked, axis=1))
        )
        cache = dataclasses.replace(cache, keys=ran.keys, values=ran.values, inputs=inputs, tracked=tracked)
        computed = canvas.valid.astype(jnp.int32) * spec.model.config.layers
        return self._pass(spec, cache, window, ran.output, computed, jnp.float32(spec.length))

    def _elastic(self, spec: Spec, params, cache: Tracked, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
        layers, length = spec.model.config.layers, spec.length
        window, decoded = first_of(scope.candidates, self.window), scope.visible & ~canvas.masked
        everywhere = jnp.ones(cache.tracked[:, :, 0].shape, bool)
        wanted = window | shift_left(window, spec.model.shift) | cache.fresh
        for place in range(self.track):
            wanted = put_rows(wanted, cache.tracked[:, :, place], everywhere, everywhere)
        wanted = wanted & canvas.valid
        slot = slots_of(wanted, self._capacity(spec))
        rows = rows_at(canvas, slot, mine)
        looking = rows.valid & take_rows(window, slot)
        place = jnp.cumsum(wanted, axis=1, dtype=jnp.int32) - 1  # of a slot in the row set
        hidden = put_rows(cache.inputs[0], slot, embed_rows(spec.model, params, canvas, rows), rows.valid)
        above = jnp.zeros((spec.batch,), bool)  # whether the layer below was computed whole
        past = jnp.broadcast_to(self.boundary <= 0, above.shape)
        keys, values, inputs, tracked = list(cache.keys), list(cache.values), list(cache.inputs), []
        computed, executed = jnp.zeros(wanted.shape, jnp.int32), jnp.float32(0)
        for layer in range(layers):
            # The boundary layer takes up again the inputs that were kept of it.
            now = jnp.where((above[:, None] | wanted)[..., None], hidden, inputs[layer])
            ran = (past[:, None] & canvas.valid) | wanted
            followed = cache.tracked[:, layer]
            state = (inputs[layer], keys[layer], values[layer], canvas, scope.visible)
            arguments = (now, rows, followed, ran & mine[:, None], *state)
            whole = (past & mine).any()
            hidden, keys[layer], values[layer], attention, reference = jax.lax.cond(
                whole,
                lambda *arguments, layer=layer: layer_canvas(spec, params, layer, *arguments),
                lambda *arguments, layer=layer: layer_rows(spec, params, layer, *arguments),
                *arguments,
            )
            inputs[layer] = jnp.where((ran & mine[:, None])[..., None], now, inputs[layer])
            index = take_rows(place, followed)[:, None, :, None]
            again = jnp.take_along_axis(attention, index, axis=2, mode="clip")
            alike = similarity(again, reference, scope.visible, self.along)
            tracked.append(most_attended(head_mean(attention), looking, decoded, self.track))
            computed, executed = computed + ran, executed + jnp.where(whole, length, slot.shape[1])
            above, past = past, past | (alike < self.gamma) | (self.boundary <= layer + 1)
        cache = dataclasses.replace(
            cache,
            keys=tuple(keys),
            values=tuple(values),
            inputs=tuple(inputs),
            tracked=replace_mine(mine, cache.tracked, jnp.stack(tracked, axis=1)),
        )
        return self._pass(spec, cache, window, hidden, computed, executed / layers)

    def _pass(self, spec: Spec, cache: Tracked, window: jax.Array, output: jax.Array, computed, executed) -> Pass:
        """The window's rows predict."""
        slot = slots_of(shift_left(window, spec.model.shift), self.window)
        return Pass(cache, take_rows(output, slot), slot, slot < spec.length, {}, computed, executed)
