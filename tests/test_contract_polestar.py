"""Polestar with its approximations switched off is the method that it approximates (contract 2)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from methods_table import FAMILIES
from recorded_logits import assert_same, run

from polestar_jax import methods
from polestar_jax.types import NO_FORWARD

# Batch, prompt slots, G, S. Every shape is a compilation of four methods.
SHAPES = ((1, 5, 4, 4), (4, 7, 12, 2))
MORE_SHAPES = ((2, 1, 8, 8), (3, 9, 12, 4), (2, 4, 20, 5))
each_family = pytest.mark.parametrize("family", FAMILIES)
seeds = st.integers(0, 10**6)
some = settings(derandomize=True, deadline=None, max_examples=24)


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
        capacities=(1.0,) if size == 4 else (0.5, 1.0),  # without and with packing
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
