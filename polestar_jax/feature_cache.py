"""Cached features of every layer: keys, values, attention outputs and feed-forward outputs (dLLM-Cache, Dynamic-dLLM).

The residual stream of the whole canvas is rebuilt in every forward. Layer 0 is always complete. In a later layer some
rows are computed, and every other row adds what its attention and its feed-forward part gave when it last was one of
them. Prompt and response are refreshed each in its own interval; in between, a method chooses rows of the response by
how far their values have moved.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from polestar_jax.attention import attend, empty_cache, project_rows, write_cache
from polestar_jax.rows import (
    count_rows,
    embed_rows,
    iota,
    put_rows,
    replace_mine,
    rows_at,
    take_rows,
    whole_pass,
)
from polestar_jax.types import Canvas, Pass, RowSet, Scope, Spec, pytree


@pytree
class LayerFeatures:
    """What is kept of one layer.

    Attributes:
      keys, values: `[B, Hkv, N, A]`, keys rotated.
      attended: `[B, N, D]`, what attention added to the residual stream.
      fed: `[B, N, D]`, what the feed-forward part added.
    """

    keys: jax.Array
    values: jax.Array
    attended: jax.Array
    fed: jax.Array


@pytree
class Features:
    """What is kept between forwards.

    Attributes:
      layers: of layers 1 to L - 1; layer 0 is never reused.
      forwards: int32 `[B]`, forwards spent.
    """

    layers: tuple[LayerFeatures, ...]
    forwards: jax.Array


def empty_features(spec: Spec) -> Features:
    """Before the first forward, which is complete."""
    shape = (spec.batch, spec.length, spec.model.config.model_size)
    plane = lambda: jnp.zeros(shape, spec.model.config.dtype)
    pairs = zip(empty_cache(spec)[1:], empty_cache(spec)[1:], strict=True)
    layers = tuple(LayerFeatures(keys, values, plane(), plane()) for keys, values in pairs)
    return Features(layers, jnp.zeros((spec.batch,), jnp.int32))


KINDS = ("step", "prompt", "response", "full")
"""What is refreshed: some rows of the response, the prompt too, the whole response, everything."""


def refresh_kind(features: Features, prompt_interval, response_interval) -> jax.Array:
    """int32 `[B]`, index into `KINDS`: a part is refreshed in the first forward and in every `interval`-th after it."""
    due = lambda interval: (features.forwards % interval == 0).astype(jnp.int32)
    return due(prompt_interval) + 2 * due(response_interval)


FirstRow = Literal["exact", "prompt"]
"""Where logits are shifted, whose the row is that predicts the first generated position, the last one of the prompt:
refreshed with the response ("exact"), or with the prompt it stands in ("prompt", the originals' habit on Dream)."""


def response_start(spec: Spec, first_row: FirstRow) -> int:
    """The first slot that is refreshed with the response: P, or P - shift."""
    return spec.prompt_length - (spec.model.shift if first_row == "exact" else 0)


def feature_problems(prompt_interval, response_interval, first_row: FirstRow) -> list[str]:
    """What is wrong with the fields that the methods share."""
    named = {"prompt_interval": prompt_interval, "response_interval": response_interval}
    found = [f"{name}={value} must be at least 1" for name, value in named.items() if value < 1]
    if first_row not in get_args(FirstRow):
        found.append(f"first_row={first_row!r} must be one of {', '.join(get_args(FirstRow))}")
    return found


Choose = Callable[[int, jax.Array, jax.Array], tuple[jax.Array | None, Any]]
"""`choose(layer, inputs [B, G', D], change [B, G'])`: which rows of the response a layer computes, and a note.

G' counts the response's rows, see `response_start`; `change` is how far their values moved, see `values_change`. The
rows are int32 `[B, C]`, none twice and -1 for none, or None, which keeps even the values at hand from being stored;
they are read where the response is not refreshed as a whole.
"""


def values_change(now: jax.Array, before: jax.Array) -> jax.Array:
    """`vectors_change` of values `[B, Hkv, R, A]`, all heads of a row as one vector."""
    flat = lambda values: values.swapaxes(1, 2).reshape(values.shape[0], values.shape[2], -1)
    return vectors_change(flat(now), flat(before))


def vectors_change(now: jax.Array, before: jax.Array) -> jax.Array:
    """1 - cosine between vectors `[B, R, D]`: float32 `[B, R]`, 1 where one of them is zero."""
    unit = lambda x: x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))
    return 1 - jnp.sum(unit(now.astype(jnp.float32)) * unit(before.astype(jnp.float32)), axis=-1)


def _complete_layer(spec: Spec, params, layer: int, hidden, canvas: Canvas, visible) -> tuple[jax.Array, LayerFeatures]:
    """A layer in which every row is computed."""
    query, key, value = project_rows(spec.model, params, layer, hidden, canvas.position)
    attended, _ = attend(query, key, value, visible)
    attended = spec.model.attention_output(params, layer, attended)
    hidden = hidden + attended
    fed = spec.model.feed_forward(params, layer, hidden)
    return hidden + fed, LayerFeatures(key, value, attended, fed)


def _partial_layer(
    spec: Spec, params, layer: int, hidden, rows: RowSet, kept: LayerFeatures, visible
) -> tuple[jax.Array, LayerFeatures]:
    """A layer in which `rows` are computed, and the others take what is `kept`."""
    if not rows.slot.shape[1]:
        return hidden + kept.attended + kept.fed, kept
    query, key, value = project_rows(spec.model, params, layer, take_rows(hidden, rows.slot), rows.position)
    keys, values = write_cache(kept.keys, rows, key), write_cache(kept.values, rows, value)
    attended, _ = attend(query, keys, values, visible)
    output = spec.model.attention_output(params, layer, attended)
    attended = put_rows(kept.attended, rows.slot, output, rows.write)
    hidden = hidden + attended
    output = spec.model.feed_forward(params, layer, take_rows(hidden, rows.slot))
    fed = put_rows(kept.fed, rows.slot, output, rows.write)
    return hidden + fed, LayerFeatures(keys, values, attended, fed)


def _rows(
    canvas: Canvas, start: int, mine: jax.Array, kind: str, chosen: jax.Array | None, visible: jax.Array
) -> RowSet:
    """The rows of a layer: the prompt's, the response's, the `chosen` ones of the response."""
    everyone = jnp.broadcast_to(iota(canvas.tokens.shape[1]), canvas.tokens.shape)
    if kind == "response":
        return rows_at(canvas, everyone[:, start:], mine, visible=visible)
    picked = everyone[:, :0] if chosen is None else jnp.where(chosen < 0, -1, start + chosen)
    prompt = everyone[:, : start if kind == "prompt" else 0]
    return rows_at(canvas, jnp.concatenate([prompt, picked], axis=1), mine, visible=visible)


class FeatureForward(NamedTuple):
    """What a forward leaves behind.

    Attributes:
      done: the `Pass`, its cache still to be filled in.
      layers: of layers 1 to L - 1; only batch rows that are `mine` differ.
      notes: of layers 1 to L - 1, what `choose` noted.
    """

    done: Pass
    layers: tuple[LayerFeatures, ...]
    notes: list[Any]


def forward_features(
    spec: Spec, params, features: Features, canvas: Canvas, scope: Scope, mine, kind: str, start: int, choose: Choose
) -> FeatureForward:
    """Runs the whole canvas, computing of each layer after the first what `kind` and `choose` ask for.

    Args:
      mine: bool `[B]`.
      kind: one of `KINDS`.
      start: of the response, see `response_start`.
      choose: see `Choose`.
    """
    model, valid = spec.model, (canvas.valid & scope.visible).astype(jnp.int32)
    everyone = jnp.broadcast_to(iota(spec.length), canvas.tokens.shape)
    hidden = embed_rows(model, params, canvas, rows_at(canvas, everyone, mine))
    hidden, _ = _complete_layer(spec, params, 0, hidden, canvas, scope.visible)
    computed, executed, layers, notes = valid, spec.length, [], []
    for layer, kept in enumerate(features.layers, start=1):
        inputs, before = hidden[:, start:], kept.values[:, :, start:]
        value = model.project(params, layer, inputs)[2].swapaxes(1, 2)
        chosen, note = choose(layer, inputs, values_change(value, before))
        if kind == "full":
            hidden, fresh = _complete_layer(spec, params, layer, hidden, canvas, scope.visible)
            kept = replace_mine(mine, kept, fresh)
            computed, executed = computed + valid, executed + spec.length
        else:
            if kind != "response" and chosen is not None:
                value = kept.values.at[:, :, start:].set(replace_mine(mine, before, value))
                kept = dataclasses.replace(kept, values=value)
            rows = _rows(canvas, start, mine, kind, chosen, scope.visible)
            hidden, kept = _partial_layer(spec, params, layer, hidden, rows, kept, scope.visible)
            computed = computed + count_rows(spec, rows.slot, rows.valid)
            executed += rows.slot.shape[1]
        layers.append(kept)
        notes.append(note)
    done = whole_pass(spec, None, canvas, scope, hidden)
    executed = jnp.float32(executed / model.config.layers)
    return FeatureForward(done._replace(computed=computed, executed=executed), tuple(layers), notes)
