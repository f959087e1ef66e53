"""The cache policy of Fast-dLLM: keys and values outside a row set stay as they were at the block's entry."""

import jax
import jax.numpy as jnp

from polestar_jax.attention import empty_cache
from polestar_jax.rows import (
    block_slots,
    forward_canvas,
    forward_rows,
    iota,
    rows_at,
    rows_pass,
    whole_pass,
)
from polestar_jax.types import Branch, Canvas, Commits, Pass, Prediction, Scope, Signal, Spec, pytree, static


@pytree
class KeysValues:
    """Rotated keys and values, per layer `[B, Hkv, N, A]`."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def full_entry(spec: Spec, params, cache: KeysValues, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
    """A whole-canvas forward that fills the cache."""
    ran = forward_canvas(spec, params, canvas, scope.visible, cached=(cache.keys, cache.values, mine))
    return whole_pass(spec, KeysValues(ran.keys, ran.values), canvas, scope, ran.output)


@pytree
class BlockCache:
    """Keys and values outside a row set stay as they were at the block's entry.

    Attributes:
      mode: "dual" recomputes the block, "prefix" the block and everything after it.
    """

    mode: str = static(default="dual")

    @property
    def provides(self) -> frozenset[Signal]:
        return frozenset()

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset()

    def problems(self, spec: Spec) -> list[str]:
        return [] if self.mode in ("dual", "prefix") else [f"cache={self.mode!r} must be 'dual' or 'prefix'"]

    def width(self, spec: Spec) -> int:
        return spec.span + spec.model.shift

    def init(self, spec: Spec) -> KeysValues:
        return KeysValues(empty_cache(spec), empty_cache(spec))

    def restart(self, spec: Spec, state: KeysValues) -> KeysValues:
        return state  # every block begins with an entry that overwrites all of it

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        step = dual_step if self.mode == "dual" else prefix_step
        bind = lambda run: lambda *arguments: run(spec, *arguments)
        return Branch("step", bind(step)), Branch("entry", bind(full_entry))

    def kind(self, spec: Spec, cache: KeysValues, scope: Scope) -> jax.Array:
        return scope.entering.astype(jnp.int32)

    def observe(
        self, spec: Spec, cache: KeysValues, scope: Scope, prediction: Prediction, commits: Commits
    ) -> KeysValues:
        return cache


def dual_step(spec: Spec, params, cache: KeysValues, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
    """Recomputes the block's rows."""
    rows = rows_at(canvas, block_slots(spec, scope), mine, contiguous=True)
    ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
    return rows_pass(spec, KeysValues(ran.keys, ran.values), rows, ran.output)


def prefix_step(spec: Spec, params, cache: KeysValues, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
    """Recomputes every row from the block on; the row set is as long as the generation, its tail invalid."""
    block = block_slots(spec, scope)
    slot = block[:, :1] + iota(spec.gen_length + spec.model.shift)
    rows = rows_at(canvas, slot, mine, contiguous=True)
    ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
    done = rows_pass(spec, KeysValues(ran.keys, ran.values), rows, ran.output)
    width = block.shape[1]
    return done._replace(hidden=done.hidden[:, :width], slot=block, valid=done.valid[:, :width])
