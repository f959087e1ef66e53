"""Decodes that also keep their logits, for contracts that say two methods are one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from methods_table import FAMILIES, lively_params, pad, prompts_of

from polestar_jax import make_decode
from polestar_jax.commit import candidate_rows
from polestar_jax.rows import iota, put_rows
from polestar_jax.types import Commits, Signal, Spec, pytree


@pytree
class Recorded:
    """A rule that also keeps the logits of every candidate it was shown: float32 `[B, T, N, V]`, NaN elsewhere."""

    rule: Any

    revokes = property(lambda self: self.rule.revokes)
    progresses = property(lambda self: self.rule.progresses)

    @property
    def needs(self) -> frozenset[Signal]:
        return self.rule.needs | {"logits"}

    def problems(self, spec: Spec) -> list[str]:
        return self.rule.problems(spec)

    def init(self, spec: Spec):
        shape = (spec.batch, spec.gen_length, spec.length, spec.model.config.vocab_size)
        return self.rule.init(spec), jnp.zeros((spec.batch,), jnp.int32), jnp.full(shape, jnp.nan, jnp.float32)

    def commit(self, spec: Spec, state, scope, canvas, prediction) -> tuple[Any, Commits]:
        inner, count, seen = state
        inner, commits = self.rule.commit(spec, inner, scope, canvas, prediction)
        plane = jnp.full(seen[:, 0].shape, jnp.nan, jnp.float32)
        plane = put_rows(plane, prediction.slot, prediction.extra["logits"], candidate_rows(scope, prediction))
        now = (iota(spec.gen_length) == count[:, None])[:, :, None, None]
        return (inner, count + 1, jnp.where(now, plane[:, None], seen)), commits


@pytree
class LastLogits(Recorded):
    """A rule that also keeps the logits of every slot that the last forward predicted: `[B, N, V]`, NaN elsewhere."""

    def init(self, spec: Spec):
        shape = (spec.batch, spec.length, spec.model.config.vocab_size)
        return self.rule.init(spec), jnp.full(shape, jnp.nan, jnp.float32)

    def commit(self, spec: Spec, state, scope, canvas, prediction) -> tuple[Any, Commits]:
        inner, seen = state
        inner, commits = self.rule.commit(spec, inner, scope, canvas, prediction)
        nothing = jnp.full_like(seen, jnp.nan)
        return (inner, put_rows(nothing, prediction.slot, prediction.extra["logits"], prediction.valid)), commits


def recorded(method):
    return dataclasses.replace(method, rule=Recorded(method.rule))


def run(family: str, make, shape, seed: int, *numbers):
    """Output and logits `[B, T, N, V]` of a method on random prompts and weights."""
    batch, length, gen_length, size = shape
    model, random = FAMILIES[family], np.random.default_rng(seed)
    decode = make_decode(model, recorded(make(size, *numbers)), gen_length=gen_length)
    prompts = prompts_of(model.config, random.integers(1, length + 1, batch), seed)
    state = decode.init(jax.random.split(jax.random.key(seed), batch), length)
    output, state = decode(lively_params(model, seed % 8), state, pad(prompts, length, garbage=seed))
    return jax.tree.map(np.asarray, output), np.asarray(state.rule[2])


def assert_same(ours, theirs, fields) -> None:
    (output, logits), (expected, expected_logits) = ours, theirs
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    np.testing.assert_array_equal(output.forwards, expected.forwards)
    for field in fields:
        np.testing.assert_array_equal(getattr(output.log, field), getattr(expected.log, field), err_msg=field)
    np.testing.assert_allclose(logits, expected_logits, atol=1e-4, rtol=0)
    assert np.isfinite(logits[:, 0]).any(axis=(1, 2)).all()
