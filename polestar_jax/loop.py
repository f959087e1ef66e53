"""The one loop that every method runs in, as pure functions of an explicit state (docs/frame.md)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from polestar_jax.head import predict
from polestar_jax.placement import pin_rows
from polestar_jax.prompts import new_canvas
from polestar_jax.rows import iota, put_rows, replace_mine
from polestar_jax.types import (
    NO_FORWARD,
    NOTHING,
    REVOKED,
    Canvas,
    Commits,
    DecodeOutput,
    DecodeState,
    Method,
    Prediction,
    Prompt,
    Scope,
    Spec,
    StepLog,
)


def fresh_state(spec: Spec, method: Method, keys: jax.Array, prompt: Prompt | None = None) -> DecodeState:
    """A state before the first forward; without a prompt, one of zeros."""
    if prompt is None:
        shape = (spec.batch, spec.prompt_length)
        prompt = Prompt(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
    forwards = method.schedule.max_forwards(spec.gen_length)
    per_forward = (spec.batch, forwards)
    measured = spec.gen_length if "drift" in spec.needs else 0
    state = DecodeState(
        keys=keys,
        forwards=jnp.zeros((spec.batch,), jnp.int32),
        stopped=jnp.zeros((spec.batch,), bool),
        canvas=new_canvas(spec, prompt),
        schedule=method.schedule.init(spec),
        cache=method.cache.init(_cache_spec(spec, method)),
        rule=method.rule.init(spec),
        log=StepLog(
            kind=jnp.full(per_forward, NO_FORWARD, jnp.uint8),
            rows=jnp.zeros(per_forward, jnp.float32),
            rows_executed=jnp.zeros(per_forward, jnp.float32),
            token=jnp.full((*per_forward, spec.gen_length), NOTHING, jnp.int32),
            reason=jnp.zeros((*per_forward, spec.gen_length), jnp.uint8),
            drift=jnp.full((*per_forward, measured), jnp.nan, jnp.float32),
            computed=jnp.zeros((*per_forward, spec.length), jnp.uint8),
        ),
    )
    return pin_rows(spec, state)


def start(spec: Spec, method: Method, state: DecodeState, prompt: Prompt) -> DecodeState:
    fresh = fresh_state(spec, method, state.keys, prompt)
    return dataclasses.replace(fresh, cache=method.cache.restart(_cache_spec(spec, method), state.cache))


def is_live(spec: Spec, state: DecodeState) -> jax.Array:
    return state.canvas.masked.any(axis=1) & ~state.stopped & (state.forwards < state.log.kind.shape[1])


def output_of(spec: Spec, state: DecodeState) -> DecodeOutput:
    generated = slice(spec.prompt_length, None)
    filled = ~state.canvas.masked[:, generated]
    return DecodeOutput(state.canvas.tokens[:, generated], filled, state.forwards, state.log)


def _cache_spec(spec: Spec, method: Method) -> Spec:
    """What the cache policy sees: with guidance every sequence is two rows, conditional and unconditional."""
    return spec if method.guidance is None else dataclasses.replace(spec, batch=2 * spec.batch)


def _doubled(tree):
    return jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), tree)


def _forward(spec: Spec, method: Method, params, state: DecodeState, scope: Scope, live: jax.Array):
    """Runs the cheapest kind of forward that a live row wants, for the rows that want it; the others wait.

    Returns:
      cache, prediction, computed `[B, M]`, executed `[]`, kind `[]`, mine `[B]`.
    """
    canvas, inner = state.canvas, _cache_spec(spec, method)
    if method.guidance is not None:
        prompt = canvas.valid & (iota(spec.length) < spec.prompt_length)
        hidden_prompt = jnp.where(prompt, spec.model.config.mask_id, canvas.tokens)
        unconditional = dataclasses.replace(canvas, tokens=hidden_prompt)
        canvas = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), canvas, unconditional)
        scope = _doubled(scope)
    branches = method.cache.branches(inner)
    width = method.cache.width(inner)
    wants = method.cache.kind(inner, state.cache, scope)[: spec.batch]
    kind = jnp.min(jnp.where(live, wants, len(branches)))
    mine = live & (wants == kind)
    # A lone row never waits for others. Said as a constant, it spares the program every choice between old and new.
    writes = jnp.ones_like(mine) if spec.batch == 1 else mine
    writes = _doubled(writes) if method.guidance is not None else writes

    def run(branch) -> Callable:
        def apply(cache):
            done = branch.run(params, cache, canvas, scope, writes)
            prediction = predict(spec, method.sampler, method.guidance, params, done, scope.keys[: spec.batch])
            pad = lambda x: jnp.pad(x, [(0, 0), (0, width - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
            by_row = jax.tree.map(pad, dataclasses.replace(prediction, planes={}))
            prediction = dataclasses.replace(by_row, planes=prediction.planes)
            return done.cache, prediction, done.computed, done.executed

        return apply

    clipped = jnp.minimum(kind, len(branches) - 1)
    cache, prediction, computed, executed = jax.lax.switch(clipped, [run(branch) for branch in branches], state.cache)
    if method.guidance is not None:
        computed, executed = computed[: spec.batch] + computed[spec.batch :], 2 * executed
    return cache, prediction, computed, executed, kind, mine


def _apply(canvas: Canvas, commits: Commits, mask_id: int) -> Canvas:
    tokens = jnp.where(commits.write, commits.tokens, jnp.where(commits.revoke, mask_id, canvas.tokens))
    return dataclasses.replace(canvas, tokens=tokens, masked=(canvas.masked | commits.revoke) & ~commits.write)


def step(spec: Spec, method: Method, params, state: DecodeState) -> tuple[DecodeState, StepLog]:
    live = is_live(spec, state)
    keys = jax.vmap(jax.random.fold_in)(state.keys, state.forwards)
    scope = method.schedule.scope(spec, state.schedule, state.canvas, keys)
    cache, prediction, computed, executed, kind, mine = _forward(spec, method, params, state, scope, live)
    schedule, scope = method.schedule.observe(spec, state.schedule, scope, prediction)
    rule, commits = method.rule.commit(spec, state.rule, scope, state.canvas, prediction)
    own = mine[:, None]
    generated = iota(spec.length) >= spec.prompt_length
    revoke = commits.revoke & own & ~state.canvas.masked & generated
    # A [MASK] that a sampler lets win is no token: the position stays masked, as in the authors' release.
    write = commits.write & own & (state.canvas.masked | revoke) & (commits.tokens != spec.model.config.mask_id)
    commits = dataclasses.replace(commits, write=write, revoke=revoke, stop=commits.stop & mine)
    canvas = _apply(state.canvas, commits, spec.model.config.mask_id)
    several = _doubled if method.guidance is not None else lambda tree: tree
    inner = _cache_spec(spec, method)
    observed = method.cache.observe(inner, cache, several(scope), several(prediction), several(commits))
    schedule = method.schedule.advance(spec, schedule, scope, canvas)
    entry = _entry(spec, scope, prediction, commits, computed, executed, kind, mine)
    state = DecodeState(
        keys=state.keys,
        forwards=state.forwards + mine,
        stopped=state.stopped | commits.stop,
        canvas=canvas,
        schedule=replace_mine(mine, state.schedule, schedule),
        cache=replace_mine(several(mine), cache, observed),
        rule=replace_mine(mine, state.rule, rule),
        log=_record(state.log, entry, state.forwards, mine),
    )
    return pin_rows(spec, state), entry


def _entry(
    spec: Spec, scope: Scope, prediction: Prediction, commits: Commits, computed, executed, kind, mine: jax.Array
) -> StepLog:
    """What one pass did, `[B, ...]`."""
    own = mine[:, None]
    generated = slice(spec.prompt_length, None)
    token = jnp.where(commits.write, commits.tokens, jnp.where(commits.revoke, REVOKED, NOTHING))
    drift = jnp.zeros((spec.batch, 0), jnp.float32)
    if "drift" in spec.needs:
        measured = prediction.valid & own & ~scope.entering[:, None]
        plane = jnp.full((spec.batch, spec.length), jnp.nan, jnp.float32)
        drift = put_rows(plane, prediction.slot, prediction.extra["drift"], measured)[:, generated]
    rows = computed.sum(axis=1) / jnp.float32(spec.model.config.layers)
    return StepLog(
        kind=jnp.where(mine, kind, NO_FORWARD).astype(jnp.uint8),
        rows=jnp.where(mine, rows, 0.0),
        rows_executed=jnp.where(mine, executed, 0.0),
        token=token[:, generated],
        reason=jnp.where(commits.write, commits.reason, 0).astype(jnp.uint8)[:, generated],
        drift=drift,
        computed=jnp.where(own, computed, 0).astype(jnp.uint8)[:, : spec.length],
    )


def _record(log: StepLog, entry: StepLog, forwards: jax.Array, mine: jax.Array) -> StepLog:
    at = jnp.where(mine, forwards, log.kind.shape[1])[:, None]
    return jax.tree.map(lambda plane, now: put_rows(plane, at, now[:, None], at >= 0), log, entry)


def run(spec: Spec, method: Method, params, state: DecodeState, prompt: Prompt) -> tuple[DecodeOutput, DecodeState]:
    state = jax.lax.while_loop(
        lambda state: is_live(spec, state).any(),
        lambda state: step(spec, method, params, state)[0],
        start(spec, method, state, prompt),
    )
    # Pinned inside the loop, small leaves may still leave it in the layout of what they are computed from.
    state = pin_rows(spec, state)
    return output_of(spec, state), state
