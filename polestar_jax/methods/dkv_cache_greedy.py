"""dKV-Cache-Greedy (arXiv 2505.15781): between complete forwards only rows around the commits are computed."""

import jax
import jax.numpy as jnp

from polestar_jax.attention import empty_cache
from polestar_jax.block_cache import KeysValues
from polestar_jax.card import Card
from polestar_jax.head import Greedy
from polestar_jax.packed_rows import packed_step, whole_step
from polestar_jax.policy import Policy
from polestar_jax.random_order import EveryCandidate, RandomOrder
from polestar_jax.rows import iota, shift_left, slots_of
from polestar_jax.types import Branch, Canvas, Commits, Method, Pass, Prediction, Scope, Spec, pytree, static

CARD = Card(
    title="dKV-Cache-Greedy",
    paper="2505.15781",
    reuses="keys and values of all rows that a forward leaves out",
    refreshes="everything, in a block's first forward and in every `interval`-th; in between the tokens committed last,"
    " those to be committed now, and the `window` nearest masks of each of these",
    commits="a fixed number per forward, in a random order",
    state="keys and values; the positions committed last; the block's order",
    rows={"step": "at most c (2 + window), c the commits of a forward", "whole": "N"},
    extra="none; where logits are shifted a step also computes the rows that predict, c more at most",
    twin="interval 1: the same order without a cache",
)


@pytree
class GreedyState:
    """Keys, values, and `last` bool `[B, N]`: the positions committed by the last forward."""

    kept: KeysValues
    last: jax.Array


def nearest_masks(slot: jax.Array, masks: jax.Array, count: int) -> jax.Array:
    """bool `[B, N]`: the `count` true positions of `masks` nearest to `slot` `[B]`, of two the left."""
    place = iota(masks.shape[1])
    distance = 2 * jnp.abs(place - slot[:, None]) + (place > slot[:, None])
    distance = jnp.where(masks, distance, 3 * masks.shape[1])
    bar = jnp.sort(distance, axis=1)[:, count - 1 : count]
    return masks & (distance <= bar)


@pytree
class GreedyCache(Policy):
    """A step computes the rows committed last, the rows to be committed, and masks near these.

    Attributes:
      interval: every `interval`-th forward of a block computes everything.
      steps: forwards for the whole generation, as in `Quota`: they tell how many positions a forward commits.
      window: masks near each row to be committed.
    """

    interval: float
    steps: int | None = static(default=None)
    window: int = static(default=4)

    def problems(self, spec: Spec) -> list[str]:
        found = [f"interval={self.interval} must be at least 1"] if self.interval < 1 else []
        if self.window < 0:
            found.append(f"window={self.window} must be at least 0")
        return found

    def init(self, spec: Spec) -> GreedyState:
        kept = KeysValues(empty_cache(spec), empty_cache(spec))
        return GreedyState(kept, jnp.zeros((spec.batch, spec.length), bool))

    def restart(self, spec: Spec, state: GreedyState) -> GreedyState:
        return state  # a block's first forward overwrites everything

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        shift = spec.model.shift
        commits = 1 if self.steps is None else -(-spec.gen_length // self.steps)
        capacity = min(commits * (2 + self.window + shift), spec.length)

        def step(params, cache: GreedyState, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
            rows = cache.last | scope.candidates
            for slot in slots_of(scope.candidates, commits).T if self.window else ():
                near = nearest_masks(slot, canvas.masked & ~rows, min(self.window, spec.length))
                rows = rows | near & (slot < spec.length)[:, None]
            rows = rows | shift_left(scope.candidates, shift)
            return state_of(packed_step(spec, params, cache.kept, canvas, scope, mine, rows, (capacity,)), cache)

        def whole(params, cache: GreedyState, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
            return state_of(whole_step(spec, params, cache.kept, canvas, scope, mine), cache)

        def state_of(done: Pass, cache: GreedyState) -> Pass:
            return done._replace(cache=GreedyState(done.cache, cache.last))

        return Branch("step", step), Branch("whole", whole)

    def kind(self, spec: Spec, cache: GreedyState, scope: Scope) -> jax.Array:
        return (scope.phase % self.interval == 0).astype(jnp.int32)

    def observe(
        self, spec: Spec, cache: GreedyState, scope: Scope, prediction: Prediction, commits: Commits
    ) -> GreedyState:
        return GreedyState(cache.kept, commits.write)


def dkv_cache_greedy(*, interval: int = 2, window: int = 4, steps: int | None = None, block_length: int = 32) -> Method:
    """dKV-Cache-Greedy; interval and window are those of the authors' program for LLaDA.

    Args:
      interval: forwards of a block between complete ones.
      window: masks computed near each position to be committed.
      steps: forwards of the whole generation, one per token if None.
      block_length: S.
    """
    return Method(
        name="dkv_cache_greedy",
        cache=GreedyCache(interval, steps, window),
        rule=EveryCandidate(),
        schedule=RandomOrder(block_length=block_length, steps=steps),
        sampler=Greedy(),
    )
