"""An adaptive cache that recomputes everything is its twin without a cache (contract 3); what its forwards cost."""

import jax.numpy as jnp
import numpy as np
import pytest
from methods_table import EVERYONE, FAMILIES, GEN_LENGTH, LENGTHS, RAGGED, decode_once
from recorded_logits import assert_same, run

from polestar_jax import methods
from polestar_jax.feature_cache import KINDS, vectors_change
from polestar_jax.methods.dynamic_dllm import layer_budgets, moved_rows, window_rows

SHAPE = (3, 7, 12, 4)  # batch, prompt slots, G, S
EVERY = {"prompt_interval": 1, "response_interval": 1}
NEVER = {"prompt_interval": 1, "response_interval": 99}
THRESHOLD = {"threshold": 0.6}


def parallel(size: int):
    return methods.parallel(block_length=size, **THRESHOLD)


ALL = {"current_k": 99, "rollout_p": 1, "capacity": 99}

TWINS = {
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
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", TWINS)
def test_twin(family, name):
    """Tokens, forwards and reasons exactly, the logits of every candidate within 1e-4."""
    ours, theirs = TWINS[name]
    for seed in range(3):
        assert_same(run(family, ours, SHAPE, seed), run(family, theirs, SHAPE, seed), ("token", "reason"))


def feature_rows(model, kind: str, prompt: int, chosen) -> float:
    """The formula of the cards of dLLM-Cache and Dynamic-dLLM."""
    later, length = model.config.layers - 1, prompt + GEN_LENGTH
    in_layer = {
        "step": chosen,
        "prompt": chosen + prompt - model.shift,
        "response": GEN_LENGTH + model.shift,
        "full": length,
    }
    return (length + later * in_layer[kind]) / model.config.layers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "chosen"), [("dllm_cache", GEN_LENGTH // 4), ("dynamic_dllm_dynamics", 3 + 2)])
def test_rows_of_cached_features(family, name, chosen):
    output = decode_once(family, name, EVERYONE, RAGGED)
    seen = set()
    for row, prompt in enumerate(LENGTHS):
        for forward in range(output.forwards[row]):
            kind = KINDS[output.log.kind[row, forward]]
            seen.add(kind)
            assert kind == KINDS[(forward % 5 == 0) + 2 * (forward % 3 == 0)]
            expected = feature_rows(FAMILIES[family], kind, prompt, chosen)
            np.testing.assert_allclose(output.log.rows[row, forward], expected, rtol=1e-6)
    assert seen >= set(KINDS) - {"full"} and "full" in seen


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
