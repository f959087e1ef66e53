"""FreeCache (FlashDLM, arXiv 2505.21467): keys and values of what is finished are never computed again."""

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.attention import empty_cache
from polestar_jax.block_cache import BlockCache, KeysValues, full_entry, prefix_step
from polestar_jax.card import Card
from polestar_jax.commit import Quota, confidence_rule
from polestar_jax.head import Greedy
from polestar_jax.policy import Policy
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Branch, Canvas, Method, Pass, Scope, Signal, Spec, pytree, static

CARD = Card(
    title="FreeCache",
    paper="2505.21467",
    reuses="keys and values before the block, as the last forward that decoded there left them",
    refreshes="the block and everything after it, in every forward; the prompt never",
    commits="as `fast_dllm`; the paper's guidance by a second, autoregressive model is left out",
    state="keys and values",
    rows={"entry": "N (the first forward alone)", "step": "N - start; one more where logits are shifted"},
    extra="none",
    twin="`parallel`, with `freeze` off",
)


def freecache(
    *,
    threshold: float | None = None,
    factor: float | None = None,
    steps: int | None = None,
    freeze: bool = True,
    block_length: int = 32,
) -> Method:
    """FreeCache without guidance.

    Args:
      threshold, factor, steps: the commit rule, as in `fast_dllm`.
      freeze: false recomputes everything in every forward.
      block_length: S.
    """
    if steps is not None and (threshold is not None or factor is not None):
        raise ValueError(f"steps={steps} excludes threshold and factor; give one")
    return Method(
        name="freecache",
        cache=CleanPrefix(freeze=freeze),
        rule=confidence_rule(threshold, factor) if steps is None else Quota(steps=steps),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )


_PREFIX = BlockCache(mode="prefix")


@pytree
class CleanState:
    """Keys and values, and bool `[B]`, whether there are any yet."""

    kept: KeysValues
    filled: jax.Array


@pytree
class CleanPrefix(Policy):
    """Every forward but the first recomputes the rows from the block on; what was before it stays for good.

    A block's keys and values are those of the forward that made its last commit, which saw [MASK] there.

    Attributes:
      freeze: see `freecache`.
    """

    freeze: bool = static(default=True)

    @property
    def provides(self) -> frozenset[Signal]:
        return _PREFIX.provides

    def problems(self, spec: Spec) -> list[str]:
        return []

    def width(self, spec: Spec) -> int:
        return _PREFIX.width(spec)

    def init(self, spec: Spec) -> CleanState:
        return CleanState(KeysValues(empty_cache(spec), empty_cache(spec)), jnp.zeros((spec.batch,), bool))

    def restart(self, spec: Spec, state: CleanState) -> CleanState:
        return dataclasses.replace(state, filled=jnp.zeros_like(state.filled))

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        def step(params, cache: CleanState, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
            done = prefix_step(_PREFIX, spec, params, cache.kept, canvas, scope, mine)
            return done._replace(cache=CleanState(done.cache, cache.filled))

        def entry(params, cache: CleanState, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
            done = full_entry(_PREFIX, spec, params, cache.kept, canvas, scope, mine)
            return done._replace(cache=CleanState(done.cache, cache.filled | mine))

        return Branch("step", step), Branch("entry", entry)

    def kind(self, spec: Spec, cache: CleanState, scope: Scope) -> jax.Array:
        return (~cache.filled).astype(jnp.int32) if self.freeze else jnp.ones_like(scope.index)
