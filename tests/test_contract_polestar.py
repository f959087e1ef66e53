"""Polestar with its approximations switched off is the method that it approximates (contract 2)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from methods_table import FAMILIES, lively_params, pad, prompts_of

from polestar_jax import make_decode, methods
from polestar_jax.commit import candidate_rows
from polestar_jax.rows import iota, put_rows
from polestar_jax.types import NO_FORWARD, Commits, Signal, Spec, pytree

# Batch, prompt slots, G, S. Every shape is a compilation of four methods.
SHAPES = ((1, 5, 4, 4), (4, 7, 12, 2))
MORE_SHAPES = ((2, 1, 8, 8), (3, 9, 12, 4), (2, 4, 20, 5))
each_family = pytest.mark.parametrize("family", FAMILIES)
seeds = st.integers(0, 10**6)
some = settings(derandomize=True, deadline=None, max_examples=24)


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


def recorded(method):
    return dataclasses.replace(method, rule=Recorded(method.rule))


def whole_window(size: int, tau: float, period: float):
    """Refreshes everything in every step: nothing in the cache is ever stale."""
    return methods.polestar(
        block_length=size,
        tau=tau,
        window_entry_period=period,
        update_threshold=-1,
        selected=8,
        selected_last=8,
        prefix_blocks=99,
        suffix_blocks=99,
        format="none",
        capacities=(1.0,),
        drift_gate=False,
        suffix_commit=False,
    )


def never_refreshed(size: int, tau: float):
    return methods.polestar(
        block_length=size,
        tau=tau,
        window_entry_period=0,
        update_threshold=float("inf"),
        drift_gate=False,
        suffix_commit=False,
    )


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


def check_whole_window(family, shape, seed, tau, period):
    """Polestar that refreshes everything against parallel decoding."""
    ours = run(family, whole_window, shape, seed, tau, period)
    theirs = run(family, lambda size, tau: methods.parallel(block_length=size, threshold=tau), shape, seed, tau)
    assert_same(ours, theirs, ("token", "reason"))
    inside = ours[0].log.kind[ours[0].log.kind != NO_FORWARD]
    assert (inside != 0).all(), "a step did not refresh"


def check_no_refresh(family, shape, seed, tau):
    """Polestar that never refreshes against Fast-dLLM's dual cache."""
    ours = run(family, never_refreshed, shape, seed, tau)
    theirs = run(family, lambda size, tau: methods.fast_dllm(block_length=size, threshold=tau), shape, seed, tau)
    assert_same(ours, theirs, ("token", "reason", "rows", "computed"))
    full = ours[0].log.kind == 3
    np.testing.assert_array_equal(full, theirs[0].log.kind == 1)


taus = st.sampled_from((0.3, 0.5, 0.7, 0.9))
periods = st.sampled_from((0, 1, 2, 3))


@each_family
@given(shape=st.sampled_from(SHAPES), seed=seeds, tau=taus, period=periods)
@some
def test_whole_window_equals_no_cache(family, shape, seed, tau, period):
    check_whole_window(family, shape, seed, tau, period)


@each_family
@given(shape=st.sampled_from(SHAPES), seed=seeds, tau=taus)
@some
def test_no_refresh_equals_dual_cache(family, shape, seed, tau):
    check_no_refresh(family, shape, seed, tau)


@pytest.mark.slow
@each_family
@given(shape=st.sampled_from(MORE_SHAPES), seed=seeds, tau=taus, period=periods)
@some
def test_more_shapes(family, shape, seed, tau, period):
    check_whole_window(family, shape, seed, tau, period)
    check_no_refresh(family, shape, seed, tau)
