"""Recorded runs of the comparison methods' original programs (tests/golden/baselines), and ours beside them."""

import functools
import json
import pathlib

import jax
import numpy as np

from convert import load_hf
from polestar_jax import make_decode

FOLDER = pathlib.Path(__file__).parent / "golden" / "baselines"


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


def replay(folder: str, name: str, method):
    """Decodes the prompt of a recorded run with `method`.

    Returns:
      the output as NumPy arrays, and the final state.
    """
    model, params = model_of(folder)
    prompt = np.array([recording(folder)["prompt"]])
    gen_length = recording(folder)["runs"][name]["arguments"]["gen_length"]
    decode = make_decode(model, method, gen_length=gen_length)
    output, state = decode(params, decode.init(jax.random.split(jax.random.key(0), 1), prompt.shape[1]), prompt)
    return jax.tree.map(np.asarray, output), state


def assert_as_recorded(folder: str, name: str, output) -> None:
    """The same tokens, forwards, and positions committed in each forward."""
    run, start = recording(folder)["runs"][name], len(recording(folder)["prompt"])
    np.testing.assert_array_equal(output.tokens[0], run["output"][start:])
    assert output.forwards[0] == run["forwards"]
    committed = [list(start + np.nonzero(token >= 0)[0]) for token in output.log.token[0, : run["forwards"]]]
    assert committed == [sorted(positions) for positions in run["committed_per_forward"]]


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
