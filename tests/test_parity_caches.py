"""Recorded runs of the original caches, reproduced token by token and forward by forward (contract 6).

Also which rows each forward computed, as the original listed them.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from baselines import assert_as_recorded, by_forward, recording, replay

from polestar_jax import methods
from polestar_jax.methods.sparse_dllm import PrunedCache
from polestar_jax.no_cache import NoCache
from polestar_jax.types import pytree

STEP, PROMPT, RESPONSE, FULL = range(4)


def counts(length: int, start: int, layers) -> np.ndarray:
    """How many of `layers`, lists of rows relative to `start`, have each slot."""
    return sum((np.bincount(np.array(rows, int) + start, minlength=length) for rows in layers), np.zeros(length, int))


def dllm_cache(folder: str, name: str):
    run = recording(folder)["runs"][name]
    arguments, cache = run["arguments"], run["cache_arguments"]
    if "kp" in cache:
        intervals, ratio = (cache["kp"], cache["kr"]), cache["rou"]
    else:
        intervals = cache["prompt_interval_steps"], cache["gen_interval_steps"]
        ratio = cache["transfer_ratio"]
    steps = arguments.get("steps")
    return methods.dllm_cache(
        prompt_interval=intervals[0],
        response_interval=intervals[1],
        ratio=ratio,
        steps=None if steps == arguments["gen_length"] else steps,
        threshold=arguments.get("threshold"),
        first_row="prompt",
        block_length=arguments["block_length"],
    )


DLLM_CACHE = [
    *(("dllm_cache", name) for name in ("one_per_step", "two_per_step", "prompt_more_often", "no_transfer")),
    *(("d2cache_ports", name) for name in ("dllm_cache_threshold", "dllm_cache_one_per_step")),
    *(("d2cache_dream", name) for name in ("dllm_cache_threshold", "dllm_cache_one_per_step")),
]


@pytest.mark.parametrize(("folder", "name"), DLLM_CACHE)
def test_dllm_cache(folder, name):
    run, start = recording(folder)["runs"][name], len(recording(folder)["prompt"])
    output, _ = replay(folder, name, dllm_cache(folder, name))
    assert_as_recorded(folder, name, output)
    length = len(run["output"])
    if all(len(rows) == run["forwards"] for rows in run["rows_per_forward_by_layer"]):
        rows = np.mean(run["rows_per_forward_by_layer"], axis=0)
        np.testing.assert_allclose(output.log.rows[0, : run["forwards"]], rows, rtol=1e-6)
    kinds = output.log.kind[0, : run["forwards"]]
    chosen = by_forward(run.get("refreshed_rows", []), kinds <= PROMPT) if run.get("refreshed_rows") else {}
    for forward, entries in chosen.items():
        expected = 1 + counts(length, start, [rows for _, _, rows in entries])
        expected[:start] += len(entries) * (kinds[forward] == PROMPT)
        np.testing.assert_array_equal(output.log.computed[0, forward], expected)


def dynamic_dllm(name: str):
    run = recording("dynamic_dllm")["runs"][name]
    arguments, cache = run["arguments"], run["cache_arguments"] or {}
    steps = arguments["steps"]
    mode = arguments.get("pd_mode")
    rule = {"steps": None if steps == arguments["gen_length"] else steps}
    if mode == 0:
        rule = {"threshold": arguments["pd_threshold"]}
    elif mode is not None:
        rule = {"dynamics": ("scalar", "position")[mode - 1], "start": arguments["pd_threshold"]}
        rule |= {key: arguments[key] for key in ("alpha", "beta")}
    scale = run["changed_scale_of_budget_softmax"]
    method = methods.dynamic_dllm(
        "release",
        prompt_interval=cache.get("prompt_interval_steps", 1),
        response_interval=cache.get("gen_interval_steps", 1),
        budget=cache.get("layer_budget", 1),
        window=cache.get("window_size", 1),
        capacity=32,
        select_from={"v": "values", "x": "inputs"}[cache.get("select_from", "v")],
        budget_scale=scale,
        block_length=arguments["block_length"],
        **rule,
    )
    return method if cache else dataclasses.replace(method, cache=NoCache())


@pytest.mark.parametrize("name", recording("dynamic_dllm")["runs"])
def test_dynamic_dllm(name):
    run, start = recording("dynamic_dllm")["runs"][name], len(recording("dynamic_dllm")["prompt"])
    output, state = replay("dynamic_dllm", name, dynamic_dllm(name))
    assert_as_recorded("dynamic_dllm", name, output)
    if "pd" in name:
        np.testing.assert_allclose(
            state.rule.threshold[0], np.broadcast_to(run["threshold_per_forward"][-1], 32), atol=1e-5
        )
    rows = np.mean(run["rows_per_forward_by_layer"], axis=0)
    np.testing.assert_allclose(output.log.rows[0, : run["forwards"]], rows, rtol=1e-6)
    kinds = output.log.kind[0, : run["forwards"]]
    chosen = [window + voted for window, voted in zip(run["window_rows"], run["voted_rows"], strict=True)]
    for forward, entries in by_forward(chosen, kinds <= PROMPT).items() if chosen else ():
        if forward == 1 and "x" in name:
            continue  # inputs are first compared with themselves: what is chosen is rounding
        expected = 1 + counts(len(run["output"]), start, entries)
        expected[:start] += len(entries) * (kinds[forward] == PROMPT)
        np.testing.assert_array_equal(output.log.computed[0, forward], expected)


@pytest.mark.parametrize("name", recording("dkv_cache")["runs"])
def test_dkv_cache(name):
    run = recording("dkv_cache")["runs"][name]
    arguments = run["arguments"]
    steps = arguments["steps"]
    method = methods.dkv_cache(
        interval=arguments["cache_reloading_step"],
        steps=None if steps == arguments["gen_length"] else steps,
        block_length=arguments["block_length"],
    )
    output, _ = replay("dkv_cache", name, method)
    assert_as_recorded("dkv_cache", name, output)
    assert_computed(output, run, method)


def assert_computed(output, run: dict, method) -> None:
    """Every layer computed as many rows as were fed, with the same tokens."""
    start, forwards = len(run["output"]) - output.tokens.shape[1], run["forwards"]
    np.testing.assert_array_equal(output.log.rows[0, :forwards], run["rows_per_forward"])
    canvas = np.array(run["output"])
    canvas[start:] = 199
    for forward, fed in enumerate(run["input_of_each_forward"]):
        layers = output.log.computed[0, forward]
        assert set(layers) <= {0, 4}
        assert list(canvas[layers > 0]) == fed
        committed = run["committed_per_forward"][forward]
        canvas[committed] = np.array(run["output"])[committed]


@pytest.mark.parametrize("name", recording("dkv_cache_greedy")["runs"])
def test_dkv_cache_greedy(name):
    """The order was drawn by torch: it is given."""
    run, start = recording("dkv_cache_greedy")["runs"][name], len(recording("dkv_cache_greedy")["prompt"])
    arguments = run["arguments"]
    steps = arguments["steps"]
    method = methods.dkv_cache_greedy(
        interval=arguments["cache_reloading_step"],
        window=arguments["window_size"],
        steps=None if steps == arguments["gen_length"] else steps,
        block_length=arguments["block_length"],
    )
    order = np.concatenate(run["committed_per_forward"])[None].astype(np.int32) - start
    method = dataclasses.replace(method, schedule=dataclasses.replace(method.schedule, order=jnp.asarray(order)))
    output, _ = replay("dkv_cache_greedy", name, method)
    assert_as_recorded("dkv_cache_greedy", name, output)
    assert_computed(output, run, method)


@pytree
class TiesAsRecorded(PrunedCache):
    """Pooling makes equals; which of them torch keeps is its sort's, so the recording tells: bool `[blocks, L, N]`."""

    recorded: Any = None

    def most_important(self, importance, slot, scope, layer):
        recorded = self.recorded[scope.index[0], layer][slot[0] % self.recorded.shape[2]]
        order = jnp.lexsort((~recorded, -importance[0]))
        return order[None, : int(self.keep_ratio * importance.shape[1])].astype(jnp.int32)


@pytest.mark.parametrize("name", recording("sparse_dllm")["runs"])
def test_sparse_dllm(name):
    run, start = recording("sparse_dllm")["runs"][name], len(recording("sparse_dllm")["prompt"])
    arguments, cache = run["arguments"], run["cache_arguments"]
    steps, size = arguments["steps"], arguments["block_length"]
    method = methods.sparse_dllm(
        keep_ratio=cache["keep_ratio"],
        kernel=cache["kernel_size"] or 1,
        steps=None if steps == arguments["gen_length"] else steps,
        block_length=size,
    )
    kept = np.zeros((arguments["gen_length"] // size, 4, len(run["output"])), bool)
    for entry in run["kept"]:
        kept[(entry["block_start"] - start) // size, entry["layer"], entry["kept_positions"]] = True
    if method.cache.kernel > 1:
        policy = TiesAsRecorded(cache["keep_ratio"], method.cache.kernel, recorded=jnp.asarray(kept))
        method = dataclasses.replace(method, cache=policy)
    output, state = replay("sparse_dllm", name, method)
    assert_as_recorded("sparse_dllm", name, output)
    np.testing.assert_array_equal(output.log.rows[0, : run["forwards"]], run["rows_per_forward"])
    for layer in range(4):
        slot = np.asarray(state.cache[layer].slot[0])
        assert sorted(slot[slot < len(run["output"])]) == list(np.nonzero(kept[-1, layer])[0])
