"""A step over rows that lie anywhere in the canvas, packed to the front of as few row slots as will hold them."""

import math

import jax
import jax.numpy as jnp

from polestar_jax.block_cache import KeysValues
from polestar_jax.rows import (
    forward_canvas,
    forward_rows,
    predicting_slots,
    put_rows,
    rows_at,
    slots_of,
    take_rows,
    whole_pass,
)
from polestar_jax.types import Canvas, Pass, Scope, Spec


def row_capacities(most: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """The room a step may be compiled for, in rows: `shares` of the `most` rows there can be, and `most`."""
    return tuple(sorted({max(1, math.ceil(share * most)) for share in (*shares, 1.0)}))


def share_problems(shares: tuple[float, ...]) -> list[str]:
    """What is wrong with the shares of `row_capacities`."""
    return [] if all(0 < share <= 1 for share in shares) else [f"capacities={shares} must be above 0 and at most 1"]


def packed_step(
    spec: Spec,
    params,
    cache: KeysValues,
    canvas: Canvas,
    scope: Scope,
    mine: jax.Array,
    plane: jax.Array,
    capacities: tuple[int, ...],
) -> Pass:
    """Computes the rows where `plane` bool `[B, N]` is true, in the smallest of `capacities` that holds everyone's.

    The rows among them that predict the block do so; the others are there for their keys and values.
    """
    plane = plane & canvas.valid & scope.visible
    predicting = predicting_slots(spec, scope)

    def run(capacity: int):
        def step():
            rows = rows_at(canvas, slots_of(plane, capacity), mine)
            ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
            hidden = jnp.zeros((*predicting.shape, ran.output.shape[-1]), ran.output.dtype)
            hidden = put_rows(hidden, rows.slot - predicting[:, :1], ran.output, rows.valid)
            return KeysValues(ran.keys, ran.values), hidden, jnp.float32(capacity)

        return step

    needed = jnp.max(jnp.where(mine, plane.sum(axis=1), 0))
    fitting = sum((needed > capacity).astype(jnp.int32) for capacity in capacities[:-1])
    kept, hidden, executed = jax.lax.switch(jnp.int32(fitting), [run(capacity) for capacity in capacities])
    computed = plane.astype(jnp.int32) * spec.model.config.layers
    valid = (predicting >= 0) & (predicting < spec.length) & take_rows(plane, predicting)
    return Pass(kept, hidden, predicting, valid, {}, computed, executed)


def whole_step(spec: Spec, params, cache: KeysValues, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
    """Computes every row."""
    ran = forward_canvas(spec, params, canvas, scope.visible, cached=(cache.keys, cache.values, mine))
    return whole_pass(spec, KeysValues(ran.keys, ran.values), canvas, scope, ran.output)
