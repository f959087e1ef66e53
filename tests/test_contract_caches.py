"""An adaptive cache that recomputes everything is its twin without a cache (contract 3); its parts by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from methods_table import FAMILIES
from recorded_logits import assert_same, run

from polestar_jax import methods
from polestar_jax.block_cache import BlockCache
from polestar_jax.feature_cache import vectors_change
from polestar_jax.methods.dkv_cache_greedy import nearest_masks
from polestar_jax.methods.dynamic_dllm import layer_budgets, moved_rows, window_rows
from polestar_jax.methods.sparse_dllm import importance_of, pooled
from polestar_jax.no_cache import NoCache
from polestar_jax.prediction_dynamics import PredictionDynamics
from polestar_jax.rows import slots_of
from polestar_jax.sliding_window import SlidingWindow
from polestar_jax.types import GENERATION, Prediction, Scope, Spec, pytree

SHAPE = (3, 7, 12, 4)  # batch, prompt slots, G, S
EVERY = {"prompt_interval": 1, "response_interval": 1}
NEVER = {"prompt_interval": 1, "response_interval": 99}
THRESHOLD = {"threshold": 0.6}


def parallel(size: int):
    return methods.parallel(block_length=size, **THRESHOLD)


ALL = {"current_k": 99, "rollout_p": 1, "capacity": 99}


@pytree
class EnteredTwice(BlockCache):
    """Fast-dLLM's dual cache with two complete forwards at every block."""

    def kind(self, spec, cache, scope):
        return (scope.phase < 2).astype(jnp.int32)


def entered_twice(size: int):
    return dataclasses.replace(methods.fast_dllm(block_length=size, **THRESHOLD), cache=EnteredTwice())


def greedy(size: int):
    return methods.dkv_cache_greedy(block_length=size, interval=1, steps=6)


def uncached(make):
    return lambda size: dataclasses.replace(make(size), cache=NoCache())


def parallel_window(size: int):
    """No cache under Elastic-Cache's schedule."""
    return dataclasses.replace(parallel(size), schedule=SlidingWindow(size))


TWINS = {
    "elastic_cache": (lambda size: methods.elastic_cache(window=size, boundary=0, **THRESHOLD), parallel_window),
    "entropy_cache": (
        lambda size: methods.entropy_cache(block_length=size, max_entropy=-float("inf"), **THRESHOLD),
        parallel,
    ),
    "d2cache": (lambda size: methods.d2cache(block_length=size, **ALL, **THRESHOLD), parallel),
    "dllm_cache-intervals": (lambda size: methods.dllm_cache(block_length=size, **EVERY, **THRESHOLD), parallel),
    "dllm_cache-every_row": (
        lambda size: methods.dllm_cache(block_length=size, **NEVER, ratio=1.0, **THRESHOLD),
        parallel,
    ),
    "dynamic_dllm-intervals": (lambda size: methods.dynamic_dllm(block_length=size, **EVERY, **THRESHOLD), parallel),
    "dynamic_dllm-every_row": (
        lambda size: methods.dynamic_dllm(block_length=size, **NEVER, window=1, budget=99, budget_scale=0, **THRESHOLD),
        parallel,
    ),
    "dkv_cache": (lambda size: methods.dkv_cache(block_length=size, interval=1, **THRESHOLD), parallel),
    "dkv_cache_greedy": (greedy, uncached(greedy)),
    "sparse_dllm": (lambda size: methods.sparse_dllm(block_length=size, keep_ratio=1.0, **THRESHOLD), entered_twice),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", TWINS)
def test_twin(family, name):
    """Tokens, forwards and reasons exactly, the logits of every candidate within 1e-4."""
    ours, theirs = TWINS[name]
    for seed in range(3):
        assert_same(run(family, ours, SHAPE, seed), run(family, theirs, SHAPE, seed), ("token", "reason"))


def test_change_is_one_minus_the_cosine():
    random = np.random.default_rng(0)
    now, before = random.normal(size=(2, 3, 5, 8)).astype(np.float32)
    before[0, 0] = now[0, 0] * 3
    before[0, 1] = -now[0, 1]
    before[0, 2] = 0
    norms = np.maximum(np.linalg.norm(now, axis=-1) * np.linalg.norm(before, axis=-1), 1e-12)
    found = np.asarray(vectors_change(jnp.asarray(now), jnp.asarray(before)))
    np.testing.assert_allclose(found, 1 - (now * before).sum(-1) / norms, atol=1e-6)
    np.testing.assert_allclose(found[0, :3], [0, 2, 1], atol=1e-6)


def test_window_stays_inside():
    windows = window_rows(jnp.array([-1, 0, 3, 4, 9, 30]), 5, 10)
    starts = [0, 0, 1, 2, 5, 5]
    np.testing.assert_array_equal(windows, [list(range(start, start + 5)) for start in starts])
    np.testing.assert_array_equal(window_rows(jnp.array([7]), 10, 10)[0], range(10))


def test_budget_is_shared_by_change():
    change = jnp.array([[0.0, 0.0, 0.0], [0.0, 0.1, 0.2], [0.5, 0.5, 0.5]])
    np.testing.assert_array_equal(layer_budgets(change, 4.0, 1e-8), [[4] * 3] * 3)
    shares = np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()
    expected = [[4] * 3, list((12 * shares).astype(int)), [4] * 3]
    np.testing.assert_array_equal(layer_budgets(change, 4.0, 10.0), expected)
    np.testing.assert_array_equal(layer_budgets(change[:1], 0.9, 10.0), [[0, 0, 0]])


def test_moved_rows_are_outside_the_window():
    change = jnp.array([[0.9, 0.1, 0.8, 0.3, 0.3, 0.7], [0.9, 0.1, 0.8, 0.3, 0.3, 0.7]])
    window = jnp.array([[1, 2], [4, 5]])
    chosen = moved_rows(change, window, jnp.array([3, 9]), 5)
    np.testing.assert_array_equal(chosen, [[0, 5, 3, -1, -1], [0, 2, 3, 1, -1]])


def test_nearest_masks_are_taken_left_first():
    masks = np.array([[1, 1, 0, 0, 1, 0, 1, 1, 0, 1]], bool)
    picks = lambda slot, count: np.nonzero(np.asarray(nearest_masks(jnp.array([slot]), jnp.asarray(masks), count)))[1]
    np.testing.assert_array_equal(picks(5, 1), [4])
    np.testing.assert_array_equal(picks(5, 3), [4, 6, 7])
    np.testing.assert_array_equal(picks(3, 3), [0, 1, 4])  # 0 and 6 are equally far: the left one comes first
    np.testing.assert_array_equal(picks(0, 9), [0, 1, 4, 6, 7, 9])


def test_slots_of_a_plane():
    plane = jnp.array([[1, 0, 1, 1], [0, 0, 0, 1]], bool)
    np.testing.assert_array_equal(slots_of(plane, 2), [[0, 2], [3, 4]])
    np.testing.assert_array_equal(slots_of(plane, 5), [[0, 2, 3, 4, 4], [3, 4, 4, 4, 4]])


def test_importance_by_hand():
    """Mean query of the valid rows times every key, mean over the heads; the largest of three neighbours."""
    random = np.random.default_rng(1)
    query, keys = random.normal(size=(2, 3, 4, 6)), random.normal(size=(2, 2, 7, 6))
    valid = np.array([[1, 1, 1], [1, 0, 1]], bool)
    found = importance_of(
        *(jnp.asarray(x, jnp.float32) if x.ndim == 4 else jnp.asarray(x) for x in (query, valid, keys))
    )
    for row in range(2):
        mean = query[row, valid[row]].mean(axis=0)
        expected = np.mean([keys[row, head // 2] @ mean[head] for head in range(4)], axis=0)
        np.testing.assert_allclose(found[row], expected, atol=1e-5)
        wide = [max(expected[max(0, i - 1) : i + 2]) for i in range(7)]
        np.testing.assert_allclose(pooled(found, 3)[row], wide, atol=1e-5)
    np.testing.assert_array_equal(pooled(found, 1), found)


MODEL = FAMILIES["llada"]
V = MODEL.config.vocab_size


@pytest.mark.parametrize("mode", ["scalar", "position"])
def test_threshold_follows_the_predictions(mode):
    """Three forwards by hand: certainty lowers the threshold, change raises it, the first forward leaves it alone."""
    spec = Spec(MODEL, 2, 2, 4, 2, frozenset({"logits", GENERATION}))
    rule = PredictionDynamics(0.6, 0.2, 0.3, mode)
    state, random = rule.init(spec), np.random.default_rng(2)
    slot = np.broadcast_to(np.arange(2, 6), (2, 4)).astype(np.int32)
    masked = np.array([[0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]], bool)
    zeros = jnp.zeros(2, jnp.int32)
    scope = Scope(zeros, zeros + 2, zeros + 4, jnp.asarray(masked), jnp.ones((2, 6), bool), zeros == 0, zeros, zeros)
    threshold, before = np.full((2, 4), 0.6), None
    for _ in range(3):
        logits = random.normal(size=(2, 4, V)) * 4
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        if before is not None:
            norms = np.linalg.norm(p, axis=-1) * np.linalg.norm(before, axis=-1)
            step = 0.3 * (1 - (p * before).sum(-1) / norms) - 0.2 * (1 - np.sort(p, axis=-1)[..., -2])
            if mode == "scalar":
                step = np.stack([[step[row][masked[row, 2:]].mean()] * 4 for row in range(2)])
            threshold = threshold + step
        before = p
        confidence = p.max(axis=-1).astype(np.float32)
        prediction = Prediction(
            jnp.asarray(slot),
            jnp.ones((2, 4), bool),
            jnp.asarray(p.argmax(axis=-1), jnp.int32),
            jnp.asarray(confidence),
            {"logits": jnp.asarray(logits, jnp.float32)},
        )
        state, commits = rule.commit(spec, state, scope, None, prediction)
        np.testing.assert_allclose(state.threshold, threshold, atol=1e-5)
        for row in range(2):
            sure = masked[row, 2:] & (confidence[row] >= threshold[row])
            sure[np.argmax(np.where(masked[row, 2:], confidence[row], -1))] = True
            np.testing.assert_array_equal(commits.write[row, 2:], sure)
