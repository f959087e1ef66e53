"""The cache policy of Fast-dLLM: keys and values outside a row set stay as they were at the block's entry."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from polestar_jax.attention import empty_cache
from polestar_jax.attention_signals import ATTENTION, attention_problems, with_attention
from polestar_jax.policy import Policy
from polestar_jax.rows import (
    block_slots,
    forward_canvas,
    forward_rows,
    iota,
    reaches_far,
    rows_at,
    rows_pass,
    shift_left,
    whole_pass,
)
from polestar_jax.types import COMPUTED, Branch, Canvas, Pass, Scope, Signal, Spec, pytree, static


@pytree
class KeysValues:
    """Rotated keys and values, per layer `[B, Hkv, N, A]`."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def full_entry(
    policy: "BlockCache", spec: Spec, params, cache: KeysValues, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """A whole-canvas forward that fills the cache."""
    ran = forward_canvas(spec, params, canvas, scope.visible, cached=(cache.keys, cache.values, mine))
    done = whole_pass(spec, KeysValues(ran.keys, ran.values), canvas, scope, ran.output)
    return with_attention(spec, policy.attention_layers, done, ran.queries, ran.keys, None, scope)


FirstToken = Literal["exact", "instead", "entry"]
"""Where logits are shifted, who predicts a block's first position: the row before the block, at the block's entry alone
("entry", Fast-dLLM's habit on Dream), or in every forward of it; a step then runs that row and all of the block's
("exact"), or runs it instead of the block's last, which predicts none of the block ("instead", d2Cache's frame)."""


def first_token_problems(
    spec: Spec, first_token: FirstToken, offered: tuple[FirstToken, ...] = get_args(FirstToken)
) -> list[str]:
    """What is wrong with the `first_token` of a policy that has those `offered`."""
    if first_token not in offered:
        return [f"first_token={first_token!r} must be one of {', '.join(offered)}"]
    if first_token != "exact" and not spec.model.shift:
        return [
            f"first_token={first_token!r} is for models whose logits predict the next position, such as Dream; every"
            " row of this model predicts its own: leave it 'exact'"
        ]
    return []


def step_slots(spec: Spec, scope: Scope, first_token: FirstToken) -> jax.Array:
    """Slots of a step's block rows: `rows.block_slots`, or without their last ("instead") or first ("entry"), `[B, S]`.

    With "entry" nobody but the entry predicts the block's first position: the rule must be a
    `commit.FirstTokenAtEntry`.
    """
    slot, shift = block_slots(spec, scope), spec.model.shift
    if first_token == "exact":
        return slot
    if first_token == "entry":
        return slot[:, shift:]
    return jnp.where(slot < scope.stop[:, None] - shift, slot, spec.length)[:, : spec.span]


@pytree
class BlockCache(Policy):
    """Keys and values outside a row set stay as they were at the block's entry.

    Attributes:
      mode: "dual" recomputes the block, "prefix" the block and everything after it.
      first_token: see `step_slots`.
      attention_layers: as in `NoCache`; a step's means are over the rows that it recomputes.
    """

    mode: str = static(default="dual")
    first_token: FirstToken = static(default="exact")
    attention_layers: int = static(default=4)

    @property
    def provides(self) -> frozenset[Signal]:
        return ATTENTION | {COMPUTED}

    def problems(self, spec: Spec) -> list[str]:
        found = [] if self.mode in ("dual", "prefix") else [f"cache={self.mode!r} must be 'dual' or 'prefix'"]
        return found + first_token_problems(spec, self.first_token) + attention_problems(self.attention_layers)

    def init(self, spec: Spec) -> KeysValues:
        return KeysValues(empty_cache(spec), empty_cache(spec))

    def restart(self, spec: Spec, state: KeysValues) -> KeysValues:
        return state  # every block begins with an entry that overwrites all of it

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        step = dual_step if self.mode == "dual" else prefix_step
        bind = lambda run: lambda *arguments: run(self, spec, *arguments)
        return Branch("step", bind(step)), Branch("entry", bind(full_entry))

    def kind(self, spec: Spec, cache: KeysValues, scope: Scope) -> jax.Array:
        return scope.entering.astype(jnp.int32)


def dual_step(
    policy: "BlockCache", spec: Spec, params, cache: KeysValues, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """Recomputes the block's rows."""
    rows = rows_at(canvas, step_slots(spec, scope, policy.first_token), mine)
    ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
    done = rows_pass(spec, KeysValues(ran.keys, ran.values), rows, ran.output)
    seen = (rows.slot, rows.valid)
    return with_attention(spec, policy.attention_layers, done, ran.queries, ran.keys, seen, scope)


def prefix_step(
    policy: "BlockCache", spec: Spec, params, cache: KeysValues, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """Recomputes every row from the block on; the row set is as long as the generation, its tail invalid.

    With "instead" the last row of what is visible is left out: it predicts nothing, like the last of a block.
    """
    block = step_slots(spec, scope, policy.first_token)
    width = block.shape[1]
    slot = block[:, :1] + iota(spec.gen_length + width - spec.span)
    runs = shift_left(scope.visible, spec.model.shift) if policy.first_token == "instead" else scope.visible
    rows = rows_at(canvas, slot, mine, visible=runs)
    ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
    done = rows_pass(spec, KeysValues(ran.keys, ran.values), rows, ran.output)
    if not reaches_far(spec):
        done = done._replace(hidden=done.hidden[:, :width], slot=block, valid=done.valid[:, :width])
    seen = (rows.slot, rows.valid)
    return with_attention(spec, policy.attention_layers, done, ran.queries, ran.keys, seen, scope)
