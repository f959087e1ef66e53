"""Recorded runs of the comparison methods' original programs (tests/golden/baselines), and ours beside them."""

import dataclasses
import fnmatch
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded_logits import LastLogits

from convert import load_hf
from polestar_jax import Prompt, make_decode
from polestar_jax.types import NOTHING, REVOKED

FOLDER = pathlib.Path(__file__).parent / "golden" / "baselines"
TOLERANCE = 2e-4

NOT_REPLAYED = ("dawn/*_released", "dawn_dream/*_released", "d2cache_ports/wino_released", "dllm_cache/cfg")
"""Recorded runs, as folder/name, that no test replays, on purpose: tests/golden/README.md says why."""

REPLAYED: dict[tuple[str, str], Callable] = {}
"""Every other recorded run, folder and name, with the test that replays it."""


@functools.cache
def recording(folder: str) -> dict:
    """The `runs.json` of a folder."""
    return json.loads((FOLDER / folder / "runs.json").read_text())


@functools.cache
def arrays(folder: str):
    """The `arrays.npz` of a folder."""
    return np.load(FOLDER / folder / "arrays.npz")


@functools.cache
def model_of(folder: str):
    """The model and the weights that a folder's runs were made with."""
    return load_hf(FOLDER / recording(folder)["model"])


def matching(*patterns: str) -> list[tuple[str, str]]:
    """Folder and name of the recorded runs whose folder/name fits one of the patterns."""
    folders = sorted(path.parent.name for path in FOLDER.glob("*/runs.json"))
    runs = [(folder, name) for folder in folders for name in recording(folder)["runs"]]
    return [run for run in runs if any(fnmatch.fnmatchcase("/".join(run), pattern) for pattern in patterns)]


def replays(*patterns: str):
    """Parametrizes a test by `folder` and `name` of the matching recorded runs, and notes that it replays them."""
    left_out = matching(*NOT_REPLAYED)
    cases = [run for run in matching(*patterns) if run not in left_out]

    def mark(test):
        for run in cases:
            assert REPLAYED.setdefault(run, test) is test, f"{run} is replayed twice"
        return pytest.mark.parametrize(("folder", "name"), cases)(test)

    return mark


class Replay(NamedTuple):
    """Our decode of a recorded run.

    Attributes:
      output: NumPy arrays.
      state: the final state.
      logits: float32 `[N, V]` by predicted slot, the last forward's; NaN where it predicted nothing.
    """

    output: Any
    state: Any
    logits: np.ndarray


def decode_with_logits(model, params, tokens, method, gen_length: int, forced=None) -> Replay:
    """Decodes the prompt `tokens`, a list, with `method`; `forced` as in `Prompt`."""
    decode = make_decode(model, dataclasses.replace(method, rule=LastLogits(method.rule)), gen_length=gen_length)
    prompt = Prompt(jnp.array([tokens]), jnp.ones((1, len(tokens)), bool), forced=forced)
    output, state = decode(params, decode.init(jax.random.split(jax.random.key(0), 1), len(tokens)), prompt)
    rule, logits = state.rule
    return Replay(jax.tree.map(np.asarray, output), dataclasses.replace(state, rule=rule), np.asarray(logits[0]))


def replay(folder: str, name: str, method, forced: dict[str, int] | None = None) -> Replay:
    """Decodes the prompt of a recorded run with `method`; `forced` tokens by their place in the generation."""
    (model, params), run = model_of(folder), recording(folder)["runs"][name]
    config = dataclasses.replace(model.config, eos_id=run.get("eos_id", model.config.eos_id))
    arguments = run["arguments"]
    gen_length = arguments.get("gen_length", arguments.get("max_new_tokens"))
    given = None
    if forced is not None:
        given = np.full((1, gen_length), NOTHING)
        for place, token in forced.items():
            given[0, int(place)] = token
    model = dataclasses.replace(model, config=config)
    return decode_with_logits(model, params, recording(folder)["prompt"], method, gen_length, given)


def forwards_with_work(run: dict) -> int:
    """Forwards of a recorded run without those at its end that had nothing left to do; ours stops before them."""
    return max(forward + 1 for forward, places in enumerate(run["committed_per_forward"]) if places)


def assert_as_recorded(folder: str, name: str, replayed: Replay) -> None:
    """The same tokens and forwards; in each forward the same rows, commits and revocations; the last one's logits."""
    run, start, output = recording(folder)["runs"][name], len(recording(folder)["prompt"]), replayed.output
    forwards = forwards_with_work(run)
    np.testing.assert_array_equal(output.tokens[0], run["output"][start:])
    assert (~output.filled).sum() == (run.get("masks_left") or 0)
    assert output.forwards[0] == forwards
    by_layer = run.get("rows_per_forward_by_layer") or [run["rows_per_forward"]]
    if all(len(rows) == run["forwards"] for rows in by_layer):
        rows = np.mean(by_layer, axis=0)[:forwards]
        np.testing.assert_allclose(output.log.rows[0, :forwards], rows, rtol=1e-6)
    token = output.log.token[0, :forwards]
    committed = positions(start, token >= 0)
    if filled := run.get("filled_with_eos_at_the_end"):
        end = len(run["output"])
        assert committed[-1][-filled:] == list(range(end - filled, end))
        committed[-1] = committed[-1][:-filled]
    assert committed == [sorted(places) for places in run["committed_per_forward"][:forwards]]
    revoked = run.get("revoked_per_forward", run.get("remasked_per_forward", [[]] * forwards))
    assert positions(start, token == REVOKED) == [sorted(places) for places in revoked[:forwards]]
    if forwards == run["forwards"]:
        computed = output.log.computed[0, forwards - 1]
        shift = model_of(folder)[0].shift
        assert_logits(arrays(folder)[f"{name}/last_logits"], replayed.logits, computed, committed[-1], shift)


def positions(start: int, planes) -> list[list[int]]:
    """Canvas positions of the true entries of every plane `[G]` of a generation that begins at `start`."""
    return [[int(i) for i in start + np.flatnonzero(plane)] for plane in planes]


def assert_logits(recorded, ours, computed, committed, shift: int) -> None:
    """Every row that we predicted with has the logits of the recorded forward, those of the `committed` positions too.

    Args:
      recorded: float32 `[R, V]`, of the rows that were fed, or of the whole canvas (and a shadow after it).
      ours: float32 `[N, V]` by predicted slot, see `Replay`.
      computed: `[N]`, layers that computed each slot.
      shift: from a row to the slot that it predicts.
    """
    length = len(ours)
    row = np.arange(length) if len(recorded) >= length else np.flatnonzero(computed)
    assert len(row) <= len(recorded)
    predicted = row + shift
    known = (predicted < length) & np.isfinite(ours[np.minimum(predicted, length - 1)]).all(axis=1)
    assert set(committed) <= set(predicted[known])
    np.testing.assert_allclose(ours[predicted[known]], recorded[: len(row)][known], atol=TOLERANCE, rtol=0)


def by_forward(entries, kinds) -> dict[int, list]:
    """Entries that the original listed layer after layer, by the number of their forward.

    Args:
      entries: one per layer after the first, forward after forward.
      kinds: of every forward, whether it has entries.
    """
    with_entries = [forward for forward, has in enumerate(kinds) if has]
    per_forward = len(entries) // max(len(with_entries), 1)
    assert per_forward * len(with_entries) == len(entries)
    return {forward: entries[i * per_forward : (i + 1) * per_forward] for i, forward in enumerate(with_entries)}
