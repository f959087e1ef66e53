"""Recorded runs of the original caches, reproduced token by token and forward by forward (contract 6).

Also which rows each forward computed, as the original listed them.
"""

import dataclasses

import numpy as np
import pytest
from baselines import assert_as_recorded, by_forward, recording, replay

from polestar_jax import methods
from polestar_jax.no_cache import NoCache

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
    output, _ = replay("dynamic_dllm", name, dynamic_dllm(name))
    assert_as_recorded("dynamic_dllm", name, output)
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
