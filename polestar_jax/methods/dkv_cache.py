"""dKV-Cache-Decode (arXiv 2505.15781): a decoded token's keys and values are kept, one forward after it was decoded."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from polestar_jax.attention import empty_cache
from polestar_jax.block_cache import KeysValues
from polestar_jax.card import Card
from polestar_jax.commit import quota_or_confidence
from polestar_jax.head import Greedy
from polestar_jax.packed_rows import packed_step, row_capacities, share_problems, whole_step
from polestar_jax.policy import Policy
from polestar_jax.rows import replace_mine
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Branch, Canvas, Method, Pass, Scope, Spec, pytree, static

CARD = Card(
    title="dKV-Cache-Decode",
    paper="2505.15781",
    reuses="keys and values of tokens that were decoded before the forward before, the prompt's among them",
    refreshes="everything, in a block's first two forwards and in every `interval`-th",
    commits="a fixed number per forward, as LLaDA; or `threshold` or `factor`",
    state="keys and values; which positions were decoded before the last forward",
    rows={"step": "N - (positions decoded before the last forward)", "whole": "N"},
    extra="none; where logits are shifted, which row goes with a position is `reuse`",
    twin="`vanilla` (or `parallel`): interval 1",
)

Reuse = Literal["predicted", "both", "own"]
"""Where logits are shifted, what must be decoded before a row's keys and values are reused: the position that the row
predicts, that and its own, or its own (the original's shift types "un", "un_right" and "right")."""


@pytree
class DelayedState:
    """Keys, values, and `settled` bool `[B, N]`: positions that were decoded before the last forward."""

    kept: KeysValues
    settled: jax.Array


@pytree
class DelayedCache(Policy):
    """Every row is computed until its token has been seen by one forward, and kept from then on.

    Attributes:
      interval: every `interval`-th forward of a block computes everything, as do its first two.
      reuse: see `Reuse`.
      capacities: shares of the G rows that a step is compiled for; the smallest that holds the rows runs.
    """

    interval: float
    reuse: Reuse = static(default="predicted")
    capacities: tuple[float, ...] = static(default=(0.25, 0.5))

    def problems(self, spec: Spec) -> list[str]:
        found = share_problems(self.capacities)
        if self.interval < 1:
            found.append(f"interval={self.interval} must be at least 1")
        if self.reuse not in get_args(Reuse):
            found.append(f"reuse={self.reuse!r} must be one of {', '.join(get_args(Reuse))}")
        elif self.reuse == "own" and spec.model.shift:
            found.append(
                "reuse='own' leaves out rows that predict masked positions, where logits are shifted: the position"
                " right of a decoded one could never be committed; use 'predicted' or 'both'"
            )
        return found

    def init(self, spec: Spec) -> DelayedState:
        return DelayedState(
            KeysValues(empty_cache(spec), empty_cache(spec)), jnp.zeros((spec.batch, spec.length), bool)
        )

    def restart(self, spec: Spec, state: DelayedState) -> DelayedState:
        return state  # a block's first forward overwrites everything

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        capacities = row_capacities(spec.gen_length + spec.model.shift, self.capacities)

        def step(params, cache: DelayedState, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
            rows = ~self._reused(spec, cache.settled & ~canvas.masked)
            done = packed_step(spec, params, cache.kept, canvas, scope, mine, rows, capacities)
            return settle(done, cache, canvas, mine)

        def whole(params, cache: DelayedState, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
            return settle(whole_step(spec, params, cache.kept, canvas, scope, mine), cache, canvas, mine)

        def settle(done: Pass, cache: DelayedState, canvas: Canvas, mine: jax.Array) -> Pass:
            settled = replace_mine(mine, cache.settled, ~canvas.masked)
            return done._replace(cache=DelayedState(done.cache, settled))

        return Branch("step", step), Branch("whole", whole)

    def _reused(self, spec: Spec, settled: jax.Array) -> jax.Array:
        """bool `[B, N]`: rows whose keys and values are reused; nobody waits for a position beyond the canvas."""
        shift = spec.model.shift
        predicted = jnp.pad(settled[:, shift:], ((0, 0), (0, shift)), constant_values=True)
        return predicted if self.reuse == "predicted" else predicted & settled

    def kind(self, spec: Spec, cache: DelayedState, scope: Scope) -> jax.Array:
        return ((scope.phase < 2) | (scope.phase % self.interval == 0)).astype(jnp.int32)


def dkv_cache(
    *,
    interval: int = 8,
    reuse: Reuse = "predicted",
    steps: int | None = None,
    threshold: float | None = None,
    factor: float | None = None,
    capacities: tuple[float, ...] = (0.25, 0.5),
    block_length: int = 32,
) -> Method:
    """dKV-Cache-Decode.

    The authors' intervals: LLaDA 8 with blocks of 64 (README) or 4 with blocks of 32 (program); Dream, without blocks,
    16 (README) or 4. Their Dream program computes everything in the first forward, not the first two.

    Args:
      interval: forwards between complete ones.
      reuse: of models with shifted logits only, see `Reuse`.
      steps: forwards of LLaDA's fixed schedule, one per token if None.
      threshold, factor: commit in parallel instead, as in `parallel`.
      capacities: shares of the G rows that a step is compiled for.
      block_length: S.
    """
    return Method(
        name="dkv_cache",
        cache=DelayedCache(interval, reuse, capacities),
        rule=quota_or_confidence(steps, threshold, factor),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )
