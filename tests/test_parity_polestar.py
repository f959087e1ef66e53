"""The authors' released Polestar, replayed: every commit, label, selection and drift (contract 6)."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_hf
from polestar_jax import Reason, make_decode, methods, polestar_entry, polestar_step
from polestar_jax.cluster import Draws

GOLDEN = pathlib.Path(__file__).parent / "golden"
KINDS = {0: "full entry", 1: "window entry", 2: "step", 3: "refresh"}


@functools.cache
def case_of(name: str):
    folder = GOLDEN / f"polestar_{name}"
    model, params = load_hf(folder)
    return model, params, json.loads((folder / "case.json").read_text()), dict(np.load(folder / "trace.npz"))


def release_decode(name: str):
    """A decode of the recorded case, its k-means draws injected."""
    model, _, case, trace = case_of(name)
    method = methods.polestar("release", block_length=case["block_length"])
    draws = Draws(jnp.asarray(trace["km_init"])[None], jnp.asarray(trace["km_redraw"])[None])
    method = dataclasses.replace(method, cache=dataclasses.replace(method.cache, draws=draws))
    return make_decode(model, method, gen_length=case["gen_length"])


def new_state(decode, case):
    return decode.init(jax.random.split(jax.random.key(0), 1), len(case["prompt"]))


def recorded_reason(trace, forward: int) -> np.ndarray:
    """Our reason of every position, from the recorded bits (1 top-1, 2 confidence, 4 drift, 8 suffix)."""
    bits = trace["rule"][forward]
    reason = np.zeros(bits.shape, np.uint8)
    for bit, value in ((8, Reason.SUFFIX), (1, Reason.FORCED), (4, Reason.DRIFT), (2, Reason.CONFIDENCE)):
        reason[(bits & bit) != 0] = value
    return reason


def check_log(name: str, log) -> None:
    """Compares a step log (batch row 0) with the recorded forwards."""
    _, _, case, trace = case_of(name)
    prompt_length, names = len(case["prompt"]), ("step", "refresh", "window entry", "full entry")
    forwards = int(trace["nfe"])
    assert int((log.kind[0] != 255).sum()) == forwards
    assert [names[kind] for kind in log.kind[0, :forwards]] == [KINDS[kind] for kind in trace["step_kind"]]
    refresh = 0
    for forward in range(forwards):
        committed = np.asarray(log.token[0, forward])
        before, after = trace["x_before"][forward, prompt_length:], trace["x_after"][forward, prompt_length:]
        np.testing.assert_array_equal(np.where(committed >= 0, committed, before), after)
        np.testing.assert_array_equal(log.reason[0, forward], recorded_reason(trace, forward)[prompt_length:])
        start = int(trace["step_block"][forward]) * case["block_length"]
        block = slice(start, start + case["block_length"])
        if trace["step_kind"][forward] >= 2:
            np.testing.assert_allclose(log.drift[0, forward, block], trace["drift"][forward], atol=2e-3)
        if trace["step_kind"][forward] == 3:
            expected = trace["sel"][refresh].sum(axis=0)
            expected[prompt_length:][block] = case["n_layers"]
            np.testing.assert_array_equal(log.computed[0, forward], expected)
            refresh += 1


@pytest.mark.parametrize("name", ["a", "c"])
def test_release_decoded_freely(name):
    _, params, case, trace = case_of(name)
    decode = release_decode(name)
    output, _ = decode(params, new_state(decode, case), np.array([case["prompt"]]))
    np.testing.assert_array_equal(output.tokens[0], trace["tokens"][len(case["prompt"]) :])
    check_log(name, output.log)


def test_release_with_ties_injected(monkeypatch):
    """Case b, whose ties torch broke in its own way: the recorded choice is injected where there was one, only there.

    Run in the Python loop without jit, which also shows the cached keys and values after every forward.
    """
    _, params, case, trace = case_of("b")
    decode = release_decode("b")
    cluster, select = polestar_entry._cluster, polestar_step.select_rows
    pending = []  # (tied, rows of the window) for the layers of the refresh that is running

    def cluster_as_recorded(policy, spec, scope, stacked, region):
        entry = int(scope.index[0])
        slot = np.asarray(jnp.clip(current["slots"](scope), 0, spec.length - 1))
        found = cluster(policy, spec, scope, stacked, region)
        tied = (trace["km_ties"][entry] > 0).any(axis=-1)
        pick = lambda ours, theirs: jnp.where(tied.reshape(-1, *(1,) * (ours.ndim - 1)), theirs[:, None], ours)
        labels = np.where(np.asarray(region[0]) >= 0, trace["labels"][entry][:, slot], -1)
        return dataclasses.replace(
            found,
            labels=pick(found.labels, labels),
            counts=pick(found.counts, trace["counts"][entry]),
            centroids=pick(found.centroids, trace["centroids"][entry]),
        )

    def select_as_recorded(*arguments):
        ambiguous, recorded = pending.pop(0)
        ours, place = select(*arguments)
        if not ambiguous:
            np.testing.assert_array_equal(np.asarray(ours[0]) & recorded["inside"], recorded["rows"])
            return ours, place
        rows = jnp.asarray(recorded["rows"])[None]
        return rows, rows.cumsum(axis=1) - 1

    monkeypatch.setattr(polestar_entry, "_cluster", cluster_as_recorded)
    monkeypatch.setattr(polestar_step, "select_rows", select_as_recorded)
    size, prompt_length, refresh = case["block_length"], len(case["prompt"]), 0
    window = lambda start: np.concatenate(
        [np.arange(start - 2 * size, start), np.arange(start + size, start + 2 * size)]
    )
    current = {"slots": lambda scope: window(int(scope.start[0]))}
    state = decode.start(new_state(decode, case), np.array([case["prompt"]]))
    with jax.disable_jit():
        for forward, kind in enumerate(trace["step_kind"]):
            slots = window(prompt_length + int(trace["step_block"][forward]) * size)
            inside = (slots >= 0) & (slots < len(trace["tokens"]))
            if kind == 3:
                for layer in range(case["n_layers"]):
                    rows = inside & trace["sel"][refresh, layer][np.clip(slots, 0, len(trace["tokens"]) - 1)]
                    pending.append((trace["choice_ambiguous"][refresh, layer], {"rows": rows, "inside": inside}))
                refresh += 1
            state, _ = decode.step(params, state)
            assert not pending
            for layer in range(case["n_layers"]):
                norms = [np.linalg.norm(plane[layer]) for plane in (state.cache.keys, state.cache.values)]
                np.testing.assert_allclose(norms, trace["state_norms"][forward, layer, :2], rtol=1e-4)
    np.testing.assert_array_equal(state.canvas.tokens[0], trace["tokens"])
    check_log("b", state.log)


@pytest.mark.parametrize("name", ["a", "c"])
def test_refresh_moves_what_the_release_moved(name):
    """Labels and clusters at the entries; drift scores, packets' effect on centroids in the first refreshes."""
    _, params, case, trace = case_of(name)
    decode = release_decode(name)
    state = decode.start(new_state(decode, case), np.array([case["prompt"]]))
    refresh = 0
    for forward, kind in enumerate(trace["step_kind"][: trace["refresh_step"][3] + 1]):
        state, _ = decode.step(params, state)
        slots = np.asarray(state.cache.slot[0])
        inside = np.asarray(state.cache.region[0]) >= 0
        for layer in range(trace["labels"].shape[1]):
            window = state.cache.windows.layer(layer)
            if kind < 2 and not trace["km_ties"][trace["step_block"][forward], layer].any():
                entry = int(trace["step_block"][forward])
                np.testing.assert_array_equal(window.labels[0][inside], trace["labels"][entry, layer][slots[inside]])
                np.testing.assert_array_equal(window.counts[0], trace["counts"][entry, layer])
                np.testing.assert_allclose(window.centroids[0], trace["centroids"][entry, layer], atol=1e-3)
            if kind == 3 and refresh < 2:
                expected = trace[f"centroids_after{refresh}_layer{layer}"]
                used = np.asarray(window.counts[0]) > 0
                np.testing.assert_allclose(window.centroids[0][used], expected[used], atol=1e-3)
        refresh += kind == 3
