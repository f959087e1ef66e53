"""The one loop that every method runs in, and `make_decode`, which wraps it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from polestar_jax.head import SIGNALS, predict
from polestar_jax.prompts import check_prompt, new_canvas
from polestar_jax.rows import iota, put_rows
from polestar_jax.types import (
    NO_FORWARD,
    NOTHING,
    REVOKED,
    Canvas,
    Commits,
    DecodeOutput,
    DecodeState,
    Method,
    Model,
    Prediction,
    Prompt,
    Scope,
    Spec,
    StepLog,
)


def make_decode(model: Model, method: Method, *, gen_length: int) -> "Decode":
    """A decoder of `gen_length` tokens.

    Args:
      model: a model adapter such as `models.llada.LLaDA`.
      method: such as `polestar_jax.methods.polestar()`. Its numbers are arguments of the compiled program: a decode
        with other numbers reuses it.
      gen_length: G.

    Raises:
      ValueError: listing everything about the method that does not fit, before anything is compiled.
    """
    if gen_length < 1:
        raise ValueError(f"gen_length={gen_length} must be at least 1")
    decode = Decode(model, jax.tree.map(_as_number, method), gen_length)
    spec = decode.spec(batch=1, prompt_length=1)
    parts = (method.schedule, method.cache, method.rule, method.sampler)
    problems = [problem for part in parts for problem in part.problems(spec)]
    lacking = method.rule.needs - method.cache.provides - SIGNALS.keys()
    if lacking:
        problems.append(
            f"the commit rule {type(method.rule).__name__} needs {sorted(lacking)}, which the cache policy"
            f" {type(method.cache).__name__} does not measure"
        )
    if problems:
        raise ValueError(f"{method.name}: " + "; ".join(problems))
    return decode


def _as_number(leaf: Any) -> jax.Array:
    """Every number of a method as float32, so that 1 and 1.0 compile to the same program; arrays as they are."""
    return jnp.asarray(leaf, jnp.float32) if isinstance(leaf, (int, float)) else jnp.asarray(leaf)


@dataclasses.dataclass(frozen=True)
class Decode:
    """`output, state = decode(params, state, prompt)`; see `make_decode`.

    Attributes:
      model, method, gen_length: as given.
    """

    model: Model
    method: Method
    gen_length: int

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of forward, in the order in which `StepLog.kind` numbers them."""
        return tuple(branch.name for branch in self.method.cache.branches(self.spec(batch=1, prompt_length=1)))

    def spec(self, batch: int, prompt_length: int) -> Spec:
        span = self.method.schedule.span(self.gen_length)
        return Spec(self.model, batch, prompt_length, self.gen_length, span, self.method.rule.needs)

    def init(self, keys: jax.Array, prompt_length: int) -> DecodeState:
        """All buffers of a decode, as one pytree.

        Args:
          keys: one random key per batch row, `[B]`, from `jax.random.split(jax.random.key(seed), B)`.
          prompt_length: P, pads included.

        Raises:
          ValueError: if P + G is beyond the trained context, or `keys` is not a vector of keys.
        """
        if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.ndim != 1:
            raise ValueError(
                f"keys must be a vector of typed keys, one per batch row, not {keys.dtype}{list(keys.shape)};"
                " use jax.random.split(jax.random.key(seed), batch)"
            )
        if prompt_length < 1:
            raise ValueError(f"prompt_length={prompt_length} must be at least 1: an empty prompt cannot be decoded")
        limit = self.model.config.max_length
        if prompt_length + self.gen_length > limit:
            raise ValueError(
                f"prompt_length={prompt_length} + gen_length={self.gen_length} is beyond the model's trained context of"
                f" {limit}; shorten one of them"
            )
        return _init(self.spec(keys.shape[0], prompt_length), self.method, keys)

    def __call__(self, params: Any, state: DecodeState, prompt: Prompt | ArrayLike) -> tuple[DecodeOutput, DecodeState]:
        """Decodes `prompt` (`Prompt`, or int32 `[B, P]`) to the end. `state` is donated: use the one returned."""
        spec = self._spec_of(state)
        return _decode(spec, self.method, params, state, check_prompt(spec, prompt))

    def start(self, state: DecodeState, prompt: Prompt | ArrayLike) -> DecodeState:
        """The state before the first forward; `state` is donated."""
        spec = self._spec_of(state)
        return _start_jit(spec, self.method, state, check_prompt(spec, prompt))

    def step(self, params: Any, state: DecodeState) -> tuple[DecodeState, StepLog]:
        """One pass of the loop: at most one forward of every batch row; `state` is donated.

        Returns:
          the new state, and what this pass did: a `StepLog` without the T axis, `kind` NO_FORWARD for rows that waited.
        """
        return _step_jit(self._spec_of(state), self.method, params, state)

    def finished(self, state: DecodeState) -> jax.Array:
        """bool `[B]`: rows with nothing left to do."""
        return ~_live(self._spec_of(state), state)

    def output(self, state: DecodeState) -> DecodeOutput:
        """The output as it stands."""
        return _output(self._spec_of(state), state)

    def _spec_of(self, state: DecodeState) -> Spec:
        batch, length = state.canvas.tokens.shape
        spec = self.spec(batch, length - self.gen_length)
        expected = _abstract_state(spec, self.method)
        if jax.tree.structure(state) != jax.tree.structure(expected) or any(
            np.shape(leaf) != like.shape
            for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
        ):
            raise ValueError(
                f"this state was not made by decode.init of {self.method.name} with gen_length={self.gen_length};"
                " a state belongs to the decode that made it"
            )
        return spec


def lower_decode(decode: Decode, params: Any, prompt_length: int, batch: int = 1, sharding=None) -> jax.stages.Lowered:
    """The decode as `jax.jit` lowers it, from shapes alone.

    Args:
      decode: of any method.
      params: parameters, or their `jax.ShapeDtypeStruct`.
      prompt_length, batch: P, B.
      sharding: of every argument, for devices that are not here.
    """
    spec = decode.spec(batch, prompt_length)
    shape = (batch, prompt_length)
    prompt = jax.eval_shape(lambda: Prompt(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)))
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    arguments = jax.tree.map(place, (decode.method, params, _abstract_state(spec, decode.method), prompt))
    return _decode.lower(spec, *arguments)


def _abstract_state(spec: Spec, method: Method) -> DecodeState:
    structure = jax.tree.structure(method)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(method))
    return _abstract_state_of(spec, structure, shapes)


@functools.lru_cache(maxsize=64)
def _abstract_state_of(spec: Spec, structure, shapes) -> DecodeState:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), spec.batch))
    return jax.eval_shape(lambda method, keys: _fresh(spec, method, keys), jax.tree.unflatten(structure, shapes), keys)


def _fresh(spec: Spec, method: Method, keys: jax.Array, prompt: Prompt | None = None) -> DecodeState:
    """A state before the first forward; without a prompt, one of zeros."""
    if prompt is None:
        shape = (spec.batch, spec.prompt_length)
        prompt = Prompt(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
    forwards = method.schedule.max_forwards(spec.gen_length)
    per_forward = (spec.batch, forwards)
    measured = spec.gen_length if "drift" in spec.needs else 0
    return DecodeState(
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


def _start(spec: Spec, method: Method, state: DecodeState, prompt: Prompt) -> DecodeState:
    fresh = _fresh(spec, method, state.keys, prompt)
    return dataclasses.replace(fresh, cache=method.cache.restart(_cache_spec(spec, method), state.cache))


def _live(spec: Spec, state: DecodeState) -> jax.Array:
    return state.canvas.masked.any(axis=1) & ~state.stopped & (state.forwards < state.log.kind.shape[1])


def _output(spec: Spec, state: DecodeState) -> DecodeOutput:
    generated = slice(spec.prompt_length, None)
    filled = ~state.canvas.masked[:, generated]
    return DecodeOutput(state.canvas.tokens[:, generated], filled, state.forwards, state.log)


def _cache_spec(spec: Spec, method: Method) -> Spec:
    """What the cache policy sees: with guidance every sequence is two rows, conditional and unconditional."""
    return spec if method.guidance is None else dataclasses.replace(spec, batch=2 * spec.batch)


def _doubled(tree):
    return jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), tree)


def _freeze(mine: jax.Array, old, new):
    """`new` in the batch rows that are `mine`, else `old`; a leaf that nobody touched is not copied."""

    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return a if a is b else jnp.where(mine.reshape((-1,) + (1,) * (a.ndim - 1)), b, a)

    return jax.tree.map(pick, old, new)


def _forward(spec: Spec, method: Method, params, state: DecodeState, scope: Scope, live: jax.Array):
    """Runs the cheapest kind of forward that a live row wants, for the rows that want it; the others wait.

    Returns:
      cache, prediction, computed `[B, N]`, executed `[]`, kind `[]`, mine `[B]`.
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
    mine_inner = _doubled(mine) if method.guidance is not None else mine

    def run(branch) -> Callable:
        def apply(cache):
            done = branch.run(params, cache, canvas, scope, mine_inner)
            prediction = predict(spec, method.sampler, method.guidance, params, done, scope.keys[: spec.batch])
            pad = lambda x: jnp.pad(x, [(0, 0), (0, width - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
            return done.cache, jax.tree.map(pad, prediction), done.computed, done.executed

        return apply

    clipped = jnp.minimum(kind, len(branches) - 1)
    cache, prediction, computed, executed = jax.lax.switch(clipped, [run(branch) for branch in branches], state.cache)
    if method.guidance is not None:
        computed, executed = computed[: spec.batch] + computed[spec.batch :], 2 * executed
    return cache, prediction, computed[:, : spec.length], executed, kind, mine


def _apply(canvas: Canvas, commits: Commits, mask_id: int) -> Canvas:
    tokens = jnp.where(commits.write, commits.tokens, jnp.where(commits.revoke, mask_id, canvas.tokens))
    return dataclasses.replace(canvas, tokens=tokens, masked=(canvas.masked & ~commits.write) | commits.revoke)


def _step(spec: Spec, method: Method, params, state: DecodeState) -> tuple[DecodeState, StepLog]:
    live = _live(spec, state)
    keys = jax.vmap(jax.random.fold_in)(state.keys, state.forwards)
    scope = method.schedule.scope(spec, state.schedule, state.canvas, keys)
    cache, prediction, computed, executed, kind, mine = _forward(spec, method, params, state, scope, live)
    schedule, scope = method.schedule.observe(spec, state.schedule, scope, prediction)
    rule, commits = method.rule.commit(spec, state.rule, scope, state.canvas, prediction)
    own = mine[:, None]
    generated = iota(spec.length) >= spec.prompt_length
    commits = dataclasses.replace(
        commits,
        write=commits.write & own & state.canvas.masked,
        revoke=commits.revoke & own & ~state.canvas.masked & generated,
        stop=commits.stop & mine,
    )
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
        schedule=_freeze(mine, state.schedule, schedule),
        cache=_freeze(several(mine), cache, observed),
        rule=_freeze(mine, state.rule, rule),
        log=_record(state.log, entry, state.forwards, mine),
    )
    return state, entry


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
        computed=jnp.where(own, computed, 0).astype(jnp.uint8),
    )


def _record(log: StepLog, entry: StepLog, forwards: jax.Array, mine: jax.Array) -> StepLog:
    at = jnp.where(mine, forwards, log.kind.shape[1])[:, None]
    return jax.tree.map(lambda plane, now: put_rows(plane, at, now[:, None], at >= 0), log, entry)


def _run(spec: Spec, method: Method, params, state: DecodeState, prompt: Prompt) -> tuple[DecodeOutput, DecodeState]:
    state = jax.lax.while_loop(
        lambda state: _live(spec, state).any(),
        lambda state: _step(spec, method, params, state)[0],
        _start(spec, method, state, prompt),
    )
    return _output(spec, state), state


_init = jax.jit(_fresh, static_argnums=0)
_start_jit = jax.jit(_start, static_argnums=0, donate_argnums=2)
_step_jit = jax.jit(_step, static_argnums=0, donate_argnums=3)
_decode = jax.jit(_run, static_argnums=0, donate_argnums=3)
