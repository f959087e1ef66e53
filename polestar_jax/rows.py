"""A forward over a set of rows against the cache: the one primitive under every cache policy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polestar_jax.attention import Look, attend, project_rows, write_cache
from polestar_jax.kernels import implementation
from polestar_jax.types import COMPUTED, GENERATION, Canvas, Model, Pass, RowSet, Scope, Spec


def iota(length: int) -> jax.Array:
    """int32 `[1, length]`: 0, 1, ..."""
    return jnp.arange(length, dtype=jnp.int32)[None]


def take_rows(plane: jax.Array, index: jax.Array) -> jax.Array:
    """`plane` `[B, N, ...]` at `index` `[B, R]` -> `[B, R, ...]`; indices outside are clipped."""
    expanded = index.reshape(index.shape + (1,) * (plane.ndim - 2))
    return jnp.take_along_axis(plane, expanded, axis=1, mode="clip")


def put_rows(plane: jax.Array, index: jax.Array, values: jax.Array, write: jax.Array) -> jax.Array:
    """`plane` `[B, N, ...]` with `values` `[B, R, ...]` at `index` `[B, R]` where `write` `[B, R]`."""
    target = jnp.where(write & (index >= 0), index, plane.shape[1])
    # Over a batch axis that XLA knows to be one; indexed by batch row it would gather the rows of all devices.
    put = jax.vmap(lambda row, target, values: row.at[target].set(values, mode="drop"))
    return put(plane, target, values.astype(plane.dtype))


def rows_at(canvas: Canvas, slot: jax.Array, mine: jax.Array, *, visible: jax.Array | None = None) -> RowSet:
    """The rows at `slot` `[B, R]`: those outside the canvas and pads are invalid, and only those that are `mine` write.

    Args:
      visible: bool `[B, N]`, slots outside which rows are invalid too; None for all.
    """
    visible = canvas.valid if visible is None else canvas.valid & visible
    valid = (slot >= 0) & (slot < canvas.tokens.shape[1]) & take_rows(visible, slot)
    return RowSet(
        slot=slot,
        token=take_rows(canvas.tokens, slot),
        position=take_rows(canvas.position, slot),
        valid=valid,
        write=valid & mine[:, None],
    )


def slots_of(plane: jax.Array, capacity: int) -> jax.Array:
    """int32 `[B, capacity]`: the first slots where `plane` `[B, N]` is true, in order, then N, which is no slot."""
    length = plane.shape[1]
    found = jnp.sort(jnp.where(plane, iota(length), length), axis=1)
    return jnp.pad(found, ((0, 0), (0, max(0, capacity - length))), constant_values=length)[:, :capacity]


def shift_left(plane: jax.Array, shift: int) -> jax.Array:
    """bool `[B, N]`: the rows that predict the positions of `plane`, which are `shift` slots before them."""
    return jnp.pad(plane[:, shift:], ((0, 0), (0, shift)))


def block_slots(spec: Spec, scope: Scope) -> jax.Array:
    """Slots `[B, S + shift]` of the rows that predict the block: the row before it too, where logits are shifted.

    They follow one another; those after the end of a block that is shorter than S are N, outside the canvas.
    """
    width = spec.span + spec.model.shift
    slot = scope.start[:, None] - spec.model.shift + iota(width)
    return jnp.where(slot < scope.stop[:, None], slot, spec.length)


def predicting_slots(spec: Spec, scope: Scope) -> jax.Array:
    """Slots `[B, R]` of the rows that predict in a whole-canvas forward: the block's, or all that the rule asks for."""
    if not reaches_far(spec):
        return block_slots(spec, scope)
    slot = spec.prompt_length - spec.model.shift + iota(predicting_width(spec))
    return jnp.broadcast_to(slot, (scope.start.shape[0], slot.shape[1]))


def predicting_width(spec: Spec) -> int:
    """R of `predicting_slots`."""
    return (spec.gen_length if reaches_far(spec) else spec.span) + spec.model.shift


def reaches_far(spec: Spec) -> bool:
    """Whether the rule looks beyond the block."""
    return bool(spec.needs & {GENERATION, COMPUTED})


def embed_rows(model: Model, params, canvas: Canvas, rows: RowSet) -> jax.Array:
    """Layer-0 inputs `[B, R, D]`; a prompt's own embeddings replace those of its tokens."""
    hidden = model.embed(params, rows.token)
    if canvas.embeddings is None:
        return hidden
    given = take_rows(canvas.embeddings, rows.slot).astype(hidden.dtype)
    return jnp.where((rows.slot < canvas.embeddings.shape[1])[..., None], given, hidden)


class Forward(NamedTuple):
    """What a forward leaves behind.

    Attributes:
      inputs: the inputs of every layer, L arrays `[B, R, D]`; of a whole-canvas forward only the rows asked for.
      output: `[B, R, D]`, the last layer's.
      keys, values: per layer `[B, Hkv, M, A]`.
      queries: per layer `[B, R, H, A]`.
      seen: per layer what `look` kept of its attention, `[B, R, ...]`, or None.
    """

    inputs: list[jax.Array]
    output: jax.Array
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    queries: list[jax.Array]
    seen: list[Any]

    @property
    def query(self) -> jax.Array:
        """`[B, R, H, A]`, the last layer's."""
        return self.queries[-1]


def forward_rows(
    spec: Spec,
    params,
    keys,
    values,
    canvas: Canvas,
    rows: RowSet,
    key_mask: jax.Array,
    look: Look | None = None,
    last: Callable[..., tuple[jax.Array, Any]] | None = None,
) -> Forward:
    """Runs `rows` through every layer, writing their keys and values and attending to the whole cache.

    Args:
      keys, values: per layer `[B, Hkv, M, A]`.
      key_mask: bool `[B, M]`, keys that may be attended to.
      look: what to keep of each layer's attention, see `attend`.
      last: the last layer's `attend(query, key, value, key_mask)`, which keeps something else.
    """
    model = spec.model
    mask = key_mask if rows.key_mask is None else key_mask[:, None, :] & rows.key_mask
    hidden = embed_rows(model, params, canvas, rows)
    inputs, queries, seen, keys, values = [], [], [], list(keys), list(values)
    for layer in range(model.config.layers):
        inputs.append(hidden)
        query, key, value = project_rows(model, params, layer, hidden, rows.position)
        keys[layer] = write_cache(keys[layer], rows, key)
        values[layer] = write_cache(values[layer], rows, value)
        if last is not None and layer == model.config.layers - 1:
            attended, saw = last(query, keys[layer], values[layer], mask)
        else:
            attended, saw = attend(query, keys[layer], values[layer], mask, look, implementation(spec))
        hidden = model.finish(params, layer, hidden, attended)
        queries.append(query)
        seen.append(saw)
    return Forward(inputs, hidden, tuple(keys), tuple(values), queries, seen)


def forward_canvas(
    spec: Spec,
    params,
    canvas: Canvas,
    key_mask: jax.Array,
    *,
    cached=None,
    kept: jax.Array | None = None,
    look: Look | None = None,
) -> Forward:
    """Runs the whole canvas (R = M = N), reusing nothing.

    Args:
      key_mask: bool `[B, N]`, keys that may be attended to.
      cached: keys and values per layer, and `mine` `[B]`: batch rows that are not keep theirs.
      kept: slots `[B, W]` whose layer inputs are returned; None for none.
      look: what to keep of each layer's attention, see `attend`.
    """
    model = spec.model
    everyone = jnp.broadcast_to(iota(spec.length), canvas.tokens.shape)
    rows = RowSet(everyone, canvas.tokens, canvas.position, canvas.valid, canvas.valid)
    hidden = embed_rows(model, params, canvas, rows)
    inputs, queries, keys, values, seen = [], [], [], [], []
    for layer in range(model.config.layers):
        if kept is not None:
            # Without the barrier XLA gathers all layers' rows in the end, and keeps every [B, N, D] until then.
            inputs.append(jax.lax.optimization_barrier(take_rows(hidden, kept)))
        query, key, value = project_rows(model, params, layer, hidden, canvas.position)
        if cached is not None:
            # Attending to what is kept, not to what was computed, leaves one copy of it alive.
            old_keys, old_values, mine = cached
            key, value = replace_mine(mine, (old_keys[layer], old_values[layer]), (key, value))
        attended, saw = attend(query, key, value, key_mask, look, implementation(spec))
        hidden = model.finish(params, layer, hidden, attended)
        keys.append(key)
        values.append(value)
        queries.append(query)
        seen.append(saw)
    return Forward(inputs, hidden, tuple(keys), tuple(values), queries, seen)


def replace_mine[Tree](mine: jax.Array, old: Tree, new: Tree) -> Tree:
    """`new` where the batch row is `mine` `[B]`, else `old`; every leaf leads with B, and one that is not new stays."""

    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return a if a is b else jnp.where(mine.reshape((-1,) + (1,) * (a.ndim - 1)), b.astype(a.dtype), a)

    return jax.tree.map(pick, old, new)


def count_rows(spec: Spec, slot: jax.Array, ran: jax.Array, slots: int | None = None) -> jax.Array:
    """int32 `[B, M]`: 1 at every `slot` `[B, R]` that `ran` `[B, R]`."""
    plane = jnp.zeros((slot.shape[0], slots or spec.length), jnp.int32)
    return put_rows(plane, slot, jnp.ones_like(slot), ran)


def whole_pass(spec: Spec, cache, canvas: Canvas, scope: Scope, hidden: jax.Array) -> Pass:
    """The `Pass` of a whole-canvas forward with last outputs `hidden` `[B, N, D]`.

    Rows of slots that are not visible are none: nobody sees them, so they might as well not have been computed.
    """
    slot = predicting_slots(spec, scope)
    ran = canvas.valid & scope.visible
    valid = (slot >= 0) & (slot < spec.length) & take_rows(ran, slot)
    computed = ran.astype(jnp.int32) * spec.model.config.layers
    return Pass(cache, take_rows(hidden, slot), slot, valid, {}, computed, jnp.float32(spec.length))


def rows_pass(spec: Spec, cache, rows: RowSet, hidden: jax.Array) -> Pass:
    """The `Pass` of a forward in which every layer ran `rows`, with last outputs `hidden` `[B, R, D]`."""
    computed = count_rows(spec, rows.slot, rows.valid) * spec.model.config.layers
    executed = jnp.float32(rows.slot.shape[1])
    return Pass(cache, hidden, rows.slot, rows.valid, {}, computed, executed)
