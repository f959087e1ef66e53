"""The cache policy of d2Cache (arXiv 2509.23094): rows chosen anew for every forward."""

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.attention import empty_cache, head_mean
from polestar_jax.certainty import certainty_density
from polestar_jax.commit import rank
from polestar_jax.policy import Policy
from polestar_jax.rollout import fill_gaps, nucleus, rollout_importance
from polestar_jax.rows import (
    Forward,
    forward_canvas,
    forward_rows,
    iota,
    put_rows,
    replace_mine,
    rows_at,
    rows_pass,
    shift_left,
    slots_of,
    whole_pass,
)
from polestar_jax.types import COMPUTED, Branch, Canvas, Commits, Pass, Prediction, Scope, Signal, Spec, pytree, static


@pytree
class Chosen:
    """State of `D2Cache`.

    Attributes:
      keys, values: rotated, per layer `[B, Hkv, N, A]`.
      started: bool `[B]`, false before the first forward.
      confidence: float32 `[B, G]`, last measured.
      importance: float32 `[B, N]`, column sums of the last forward's rollout.
      masked: bool `[B, N]`, as it was in the last forward.
      stale: bool `[B, N]`, tokens committed since their row was last computed.
      wanted: bool `[B, N]`, rows of the next forward.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    started: jax.Array
    confidence: jax.Array
    importance: jax.Array
    masked: jax.Array
    stale: jax.Array
    wanted: jax.Array


@pytree
class D2Cache(Policy):
    """Every forward after the first computes a row set of its own.

    Attributes:
      current_k: masks to compute.
      rollout_p: share of the rollout that the rows chosen by attention may have.
      sigma: of the certainty density, in positions.
      inflate_w: rows between two chosen ones that are at most this far apart are computed too.
      capacity: rows that the program has room for. Of too many, the masks and new tokens are kept, then the most
        important; a new token that finds no room is computed later.
      first_confidence: 1 ranks masks by the confidence of the first forward for ever, as the release does.
      narrowed_block: with 1 "the block" is what was still masked in it, as in the release, which shortens the search.
      shifted_habits: 1 is the release with shifted logits: a confidence is renewed where the position's own row, not
        the one that predicts it, was computed; the last prompt row is computed for the first position's sake only.
    """

    current_k: float = 32
    rollout_p: float = 0.1
    sigma: float = 10.0
    inflate_w: float = 0
    first_confidence: float = 0
    narrowed_block: float = 0
    shifted_habits: float = 0
    capacity: int = static(default=128)

    @property
    def provides(self) -> frozenset[Signal]:
        return frozenset({COMPUTED})

    def problems(self, spec: Spec) -> list[str]:
        found = []
        if self.current_k < 1:
            found.append(f"current_k={self.current_k} must be at least 1")
        if not 0 <= self.rollout_p <= 1:
            found.append(f"rollout_p={self.rollout_p} must be between 0 and 1")
        if self.sigma <= 0:
            found.append(f"sigma={self.sigma} must be greater than 0")
        least = min(float(self.current_k), spec.gen_length) + 2
        if self.capacity < least:
            found.append(
                f"capacity={self.capacity} must be at least {least:.0f}: current_k={self.current_k} masks, a new token"
                " and a row chosen by attention"
            )
        return found

    def width(self, spec: Spec) -> int:
        return max(spec.gen_length + spec.model.shift, min(self.capacity, spec.length))

    def init(self, spec: Spec) -> Chosen:
        none = jnp.zeros((spec.batch, spec.length), bool)
        numbers = jnp.zeros((spec.batch, spec.length), jnp.float32)
        started, confidence = none[:, 0], numbers[:, spec.prompt_length :]
        return Chosen(empty_cache(spec), empty_cache(spec), started, confidence, numbers, none, none, none)

    def restart(self, spec: Spec, state: Chosen) -> Chosen:
        return dataclasses.replace(self.init(spec), keys=state.keys, values=state.values)

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        bind = lambda run: lambda *arguments: run(spec, *arguments)
        return Branch("rows", bind(self._rows)), Branch("full", bind(_full))

    def kind(self, spec: Spec, cache: Chosen, scope: Scope) -> jax.Array:
        return (~cache.started).astype(jnp.int32)

    def _rows(self, spec: Spec, params, cache: Chosen, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
        needed = shift_left(scope.candidates, spec.model.shift)
        first = needed & (iota(spec.length) == jnp.argmax(needed, axis=1)[:, None])
        # Whatever was chosen, the block must get a prediction.
        wanted = cache.wanted | (first & ~(cache.wanted & needed).any(axis=1, keepdims=True))
        cache = dataclasses.replace(cache, wanted=jnp.where(mine[:, None], wanted, cache.wanted))
        slot = slots_of(wanted, min(self.capacity, spec.length))
        rows = rows_at(canvas, slot, mine)
        ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible, head_mean)
        return _after(spec, cache, canvas, mine, rows_pass(spec, cache, rows, ran.output), ran, slot, rows.valid)

    def observe(self, spec: Spec, cache: Chosen, scope: Scope, prediction: Prediction, commits: Commits) -> Chosen:
        generated = slice(spec.prompt_length, None)
        confidence = self._confidence(spec, cache, prediction)
        remaining = ((cache.masked | commits.revoke) & ~commits.write)[:, generated]
        stale = cache.stale | commits.write | commits.revoke
        chosen = self._masks(spec, scope, cache.masked[:, generated], remaining, confidence)
        chosen = jnp.pad(chosen, ((0, 0), (spec.prompt_length, 0)))
        predicting = shift_left(chosen, spec.model.shift)
        last = iota(spec.length) == spec.prompt_length - 1
        apart = last & (self.shifted_habits > 0.5) & (spec.model.shift > 0)
        others = scope.visible & (~(predicting | stale) | apart)
        important = nucleus(cache.importance, others, self.rollout_p) & ~apart
        wanted = fill_gaps(predicting | stale | important, self.inflate_w)
        # Masks first, then new tokens, then by importance, then what lies between.
        place = rank(cache.importance, important)
        order = jnp.where(important, 2 + place, 2 + spec.length)
        order = jnp.where(predicting, 0, jnp.where(stale, 1, order))
        wanted = wanted & (rank(-order.astype(jnp.float32), wanted) < self.capacity)
        started = jnp.ones_like(cache.started)
        return dataclasses.replace(cache, started=started, confidence=confidence, stale=stale, wanted=wanted)

    def _confidence(self, spec: Spec, cache: Chosen, prediction: Prediction) -> jax.Array:
        """float32 `[B, G]`: with this forward's predictions."""
        slot = prediction.slot - spec.prompt_length
        seen = put_rows(cache.confidence, slot, prediction.confidence, prediction.valid)
        if spec.model.shift:
            blind = jnp.full_like(cache.confidence, 1 / spec.model.config.vocab_size)
            blind = put_rows(blind, slot, prediction.confidence, prediction.valid)
            blind = jnp.where(cache.wanted[:, spec.prompt_length :], blind, cache.confidence)
            seen = jnp.where((self.shifted_habits > 0.5) & cache.started[:, None], blind, seen)
        return jnp.where((self.first_confidence > 0.5) & cache.started[:, None], cache.confidence, seen)

    def _masks(self, spec: Spec, scope: Scope, masked, remaining: jax.Array, confidence: jax.Array) -> jax.Array:
        """bool `[B, G]`: the masks to compute next, out of the `remaining`; `masked` were so before this forward."""
        place = iota(spec.gen_length)
        block = place + spec.prompt_length
        block = (block >= scope.start[:, None]) & (block < scope.stop[:, None])
        block = block & (masked | (self.narrowed_block < 0.5))
        size = jnp.maximum(block.sum(axis=1, keepdims=True), 1)
        enough = jnp.cumsum(remaining, axis=1) >= self.current_k
        last = jnp.where(enough.any(axis=1), jnp.argmax(enough, axis=1), spec.gen_length - 1)[:, None]
        stop = (last // size + 1) * size
        searched = remaining & (place >= jnp.argmax(block, axis=1)[:, None]) & (place < stop)
        score = confidence * certainty_density(~remaining, self.sigma)
        score = score + jnp.where(block, score.max(axis=1, keepdims=True), 0.0)
        return searched & (rank(score, searched) < self.current_k)


def _full(spec: Spec, params, cache: Chosen, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
    ran = forward_canvas(spec, params, canvas, scope.visible, cached=(cache.keys, cache.values, mine), look=head_mean)
    everyone = jnp.broadcast_to(iota(spec.length), canvas.tokens.shape)
    done = whole_pass(spec, cache, canvas, scope, ran.output)
    first = spec.prompt_length - spec.model.shift
    done = done._replace(hidden=ran.output[:, first:], slot=everyone[:, first:], valid=canvas.valid[:, first:])
    return _after(spec, cache, canvas, mine, done, ran, everyone, canvas.valid)


def _after(spec: Spec, cache: Chosen, canvas: Canvas, mine, done: Pass, ran: Forward, slot, valid) -> Pass:
    """The pass with its rollout in the state."""
    importance = rollout_importance(ran.seen, slot, valid, canvas.valid)
    stale = put_rows(cache.stale, slot, jnp.zeros_like(valid), valid)
    own = replace_mine(mine, (cache.importance, cache.masked, cache.stale), (importance, canvas.masked, stale))
    importance, masked, stale = own
    return done._replace(
        cache=dataclasses.replace(
            cache, keys=ran.keys, values=ran.values, importance=importance, masked=masked, stale=stale
        )
    )
