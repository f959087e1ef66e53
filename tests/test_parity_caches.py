"""Recorded runs of the original caches, reproduced token by token and forward by forward (contract 6).

Also which rows each forward computed, as the original listed them.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from baselines import assert_as_recorded, by_forward, recording, replay, replays

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


@replays("dllm_cache/*", "d2cache_ports/dllm_cache_*", "d2cache_dream/dllm_cache_*")
def test_dllm_cache(folder, name):
    run, start = recording(folder)["runs"][name], len(recording(folder)["prompt"])
    replayed = replay(folder, name, dllm_cache(folder, name))
    assert_as_recorded(folder, name, replayed)
    output, length = replayed.output, len(run["output"])
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


@replays("dynamic_dllm/*")
def test_dynamic_dllm(folder, name):
    run, start = recording(folder)["runs"][name], len(recording(folder)["prompt"])
    replayed = replay(folder, name, dynamic_dllm(name))
    assert_as_recorded(folder, name, replayed)
    output, state, _ = replayed
    if "pd" in name:
        np.testing.assert_allclose(
            state.rule.threshold[0], np.broadcast_to(run["threshold_per_forward"][-1], 32), atol=1e-5
        )
    kinds = output.log.kind[0, : run["forwards"]]
    chosen = [window + voted for window, voted in zip(run["window_rows"], run["voted_rows"], strict=True)]
    for forward, entries in by_forward(chosen, kinds <= PROMPT).items() if chosen else ():
        if forward == 1 and "x" in name:
            continue  # inputs are first compared with themselves: what is chosen is rounding
        expected = 1 + counts(len(run["output"]), start, entries)
        expected[:start] += len(entries) * (kinds[forward] == PROMPT)
        np.testing.assert_array_equal(output.log.computed[0, forward], expected)


@replays("dkv_cache/*")
def test_dkv_cache(folder, name):
    run = recording(folder)["runs"][name]
    arguments = run["arguments"]
    steps = arguments["steps"]
    method = methods.dkv_cache(
        interval=arguments["cache_reloading_step"],
        steps=None if steps == arguments["gen_length"] else steps,
        block_length=arguments["block_length"],
    )
    replayed = replay(folder, name, method)
    assert_as_recorded(folder, name, replayed)
    assert_computed(replayed.output, run)


def assert_computed(output, run: dict) -> None:
    """Every layer computed the rows that were fed, with the same tokens."""
    start = len(run["output"]) - output.tokens.shape[1]
    canvas = np.array(run["output"])
    canvas[start:] = 199
    for forward, fed in enumerate(run["input_of_each_forward"]):
        layers = output.log.computed[0, forward]
        assert set(layers) <= {0, 4}
        assert list(canvas[layers > 0]) == fed
        committed = run["committed_per_forward"][forward]
        canvas[committed] = np.array(run["output"])[committed]


@replays("dkv_cache_greedy/*")
def test_dkv_cache_greedy(folder, name):
    """The order was drawn by torch: it is given."""
    run, start = recording(folder)["runs"][name], len(recording(folder)["prompt"])
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
    replayed = replay(folder, name, method)
    assert_as_recorded(folder, name, replayed)
    assert_computed(replayed.output, run)


@pytree
class TiesAsRecorded(PrunedCache):
    """Pooling makes equals; which of them torch keeps is its sort's, so the recording tells: bool `[blocks, L, N]`."""

    recorded: Any = None

    def most_important(self, importance, slot, scope, layer):
        recorded = self.recorded[scope.index[0], layer][slot[0] % self.recorded.shape[2]]
        order = jnp.lexsort((~recorded, -importance[0]))
        return order[None, : int(self.keep_ratio * importance.shape[1])].astype(jnp.int32)


@replays("sparse_dllm/*")
def test_sparse_dllm(folder, name):
    run, start = recording(folder)["runs"][name], len(recording(folder)["prompt"])
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
    replayed = replay(folder, name, method)
    assert_as_recorded(folder, name, replayed)
    for layer in range(4):
        slot = np.asarray(replayed.state.cache[layer].slot[0])
        assert sorted(slot[slot < len(run["output"])]) == list(np.nonzero(kept[-1, layer])[0])
