"""The cache policy of Fast-dLLM: keys and values outside a row set stay as they were at the block's entry."""

from typing import Literal, get_args

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


FirstToken = Literal["exact", "entry"]
"""Where logits are shifted, who predicts a block's first position: the row before the block, in every forward of it
("exact"), or at the block's entry alone ("entry", Fast-dLLM's habit on Dream)."""


def first_token_problems(spec: Spec, first_token: FirstToken) -> list[str]:
    """What is wrong with a policy's `first_token`."""
    if first_token not in get_args(FirstToken):
        return [f"first_token={first_token!r} must be one of {', '.join(get_args(FirstToken))}"]
    if first_token == "entry" and not spec.model.shift:
        return [
            "first_token='entry' is for models whose logits predict the next position, such as Dream; every row of this"
            " model predicts its own: leave it 'exact'"
        ]
    return []


def step_slots(spec: Spec, scope: Scope, first_token: FirstToken) -> jax.Array:
    """Slots of a step's block rows: `rows.block_slots`, or with "entry" the block's own alone, `[B, S]`.

    Nobody then predicts the block's first position but the entry: the rule must be a `commit.FirstTokenAtEntry`.
    """
    return block_slots(spec, scope) if first_token == "exact" else scope.start[:, None] + iota(spec.span)


@pytree
class BlockCache:
    """Keys and values outside a row set stay as they were at the block's entry.

    Attributes:
      mode: "dual" recomputes the block, "prefix" the block and everything after it.
      first_token: see `step_slots`.
    """

    mode: str = static(default="dual")
    first_token: FirstToken = static(default="exact")

    @property
    def provides(self) -> frozenset[Signal]:
        return frozenset()

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset()

    def problems(self, spec: Spec) -> list[str]:
        found = [] if self.mode in ("dual", "prefix") else [f"cache={self.mode!r} must be 'dual' or 'prefix'"]
        return found + first_token_problems(spec, self.first_token)

    def width(self, spec: Spec) -> int:
        return spec.span + spec.model.shift

    def init(self, spec: Spec) -> KeysValues:
        return KeysValues(empty_cache(spec), empty_cache(spec))

    def restart(self, spec: Spec, state: KeysValues) -> KeysValues:
        return state  # every block begins with an entry that overwrites all of it

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        step = dual_step if self.mode == "dual" else prefix_step
        bind = lambda run, *fields: lambda *arguments: run(spec, *fields, *arguments)
        return Branch("step", bind(step, self.first_token)), Branch("entry", bind(full_entry))

    def kind(self, spec: Spec, cache: KeysValues, scope: Scope) -> jax.Array:
        return scope.entering.astype(jnp.int32)

    def observe(
        self, spec: Spec, cache: KeysValues, scope: Scope, prediction: Prediction, commits: Commits
    ) -> KeysValues:
        return cache


def dual_step(
    spec: Spec, first_token: FirstToken, params, cache: KeysValues, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """Recomputes the block's rows."""
    rows = rows_at(canvas, step_slots(spec, scope, first_token), mine, contiguous=True)
    ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
    return rows_pass(spec, KeysValues(ran.keys, ran.values), rows, ran.output)


def prefix_step(
    spec: Spec, first_token: FirstToken, params, cache: KeysValues, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """Recomputes every row from the block on; the row set is as long as the generation, its tail invalid."""
    block = step_slots(spec, scope, first_token)
    width = block.shape[1]
    slot = block[:, :1] + iota(spec.gen_length + width - spec.span)
    rows = rows_at(canvas, slot, mine, contiguous=True, visible=scope.visible)
    ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
    done = rows_pass(spec, KeysValues(ran.keys, ran.values), rows, ran.output)
    return done._replace(hidden=done.hidden[:, :width], slot=block, valid=done.valid[:, :width])
