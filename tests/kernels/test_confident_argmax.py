"""Confident arg max against float64, in every implementation."""

import functools
import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from test_drift_attention import offered

from pallas_kernels.confident_argmax import confident_argmax
from pallas_kernels.shapes import TINY

shapes = pytest.mark.parametrize("shape", TINY.values(), ids=TINY)


def make_arrays(shape, dtype, rows):
    random = np.random.default_rng(4)
    hidden = random.normal(size=(rows, shape.model_size))
    head = random.normal(size=(shape.vocabulary, shape.model_size)) * shape.model_size**-0.5
    norm = 1 + 0.1 * random.normal(size=shape.model_size)
    mask_id = shape.vocabulary - 3
    head[mask_id] = 3 * head[7]
    hidden[::2] += 12 * head[7]  # [MASK] would win these rows
    head[shape.vocabulary // 2] = head[7]  # equals: the lower one wins
    return *(jnp.asarray(array, dtype) for array in (hidden, norm, head)), mask_id


@shapes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_float64(run, shape, dtype):
    offered(run, dtype)
    hidden, norm, head, mask_id = make_arrays(shape, dtype, shape.batch * shape.rows + shape.selected)
    op = functools.partial(confident_argmax, epsilon=1e-5, mask_id=mask_id)
    token, confidence = run(op, hidden, norm, head)
    wide = np.asarray(hidden, np.float64)
    wide = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    rounded = jnp.asarray(wide, jnp.float32).astype(dtype) * norm[None]
    logits = np.asarray(rounded, np.float64) @ np.asarray(head, np.float64).T
    probability = np.exp(logits - logits.max(-1, keepdims=True))
    probability /= probability.sum(-1, keepdims=True)
    assert mask_id in logits.argmax(-1), "[MASK] must be the likeliest word somewhere"
    logits[:, mask_id] = -np.inf
    expected = logits.argmax(-1)
    assert 7 in expected, "equal words must win somewhere"
    if run.name == "xla":  # for CPUs, it sums the products of equal rows in different orders
        token = np.where(np.asarray(token) == shape.vocabulary // 2, 7, token)
    np.testing.assert_array_equal(token, expected)
    fine = 5e-5 if dtype == "float32" else 1e-2  # the norm rounds some numbers to the other neighbour
    np.testing.assert_allclose(confidence, probability[np.arange(len(expected)), expected], rtol=fine)


def test_mask_may_win(run):
    hidden, norm, head, mask_id = make_arrays(TINY["one row"], "bfloat16", 2)
    token, _ = run(functools.partial(confident_argmax, epsilon=1e-5, mask_id=None), hidden, norm, head)
    assert token[0] == mask_id


def test_whole_vocabulary_in_one_part(run, monkeypatch):
    """The loop over a part's tiles of words."""
    if run.name != "xla":
        module = importlib.import_module(f"pallas_kernels.confident_argmax.{run.name}")
        monkeypatch.setattr(module, "PROGRAMS", 1)
    test_equals_float64(run, TINY["ragged"], "bfloat16")
