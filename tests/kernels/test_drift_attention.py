"""Drift attention against float64, in every implementation."""

import dataclasses
import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.drift_attention import DriftReference, attention, drift_attention
from pallas_kernels.drift_reference import NEGATIVE, room
from pallas_kernels.shapes import TINY

shapes = pytest.mark.parametrize("shape", TINY.values(), ids=TINY)


def exact_look(query, key, mask):
    """Scores, log sum and probabilities in float64."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    key = np.repeat(key, query.shape[2] // key.shape[1], axis=1)
    scores = np.einsum("brha,bhma->bhrm", query, key) / np.sqrt(query.shape[-1])
    scores = np.where(np.asarray(mask)[:, None, None, :], scores, NEGATIVE)
    log_sum = np.log(np.sum(np.exp(scores - scores.max(-1, keepdims=True)), -1)) + scores.max(-1)
    return scores, log_sum, np.exp(scores - log_sum[..., None])


def make_reference(scores, log_sum):
    """A reference as an earlier look would have left it."""
    pad = [(0, 0)] * 3 + [(0, room(scores.shape[-1]) - scores.shape[-1])]
    return DriftReference(
        jnp.asarray(np.pad(scores, pad, constant_values=NEGATIVE), jnp.float32), jnp.asarray(log_sum, jnp.float32)
    )


def exact_drift(now, before):
    (scores, log_sum, probability), (old, old_sum, _) = now, before
    moved = np.where(probability > 0, probability * (scores - old), 0).sum(-1) - (log_sum - old_sum)
    return np.maximum(moved, 0).mean(axis=1)


def make_arrays(shape, dtype, seed=0):
    random = np.random.default_rng(seed)
    draw = lambda *size: jnp.asarray(random.normal(size=size), dtype)
    query = 2 * draw(shape.batch, shape.rows, shape.heads, shape.head_size)
    key, value = (draw(shape.batch, shape.kv_heads, shape.keys, shape.head_size) for _ in range(2))
    mask = random.random((shape.batch, shape.keys)) < 0.7
    mask[0] = False
    mask[0, shape.keys // 2] = True  # one valid key
    if shape.batch == 1:
        mask = np.concatenate([mask, random.random((1, shape.keys)) < 0.7])[1:]
        mask[:, -1] = True
    return query, key, value, jnp.asarray(mask)


def offered(run, dtype):
    if run.name == "mosaic" and dtype == "float32":
        pytest.skip("Mosaic multiplies bfloat16 only, and says so")


@shapes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_float64(run, shape, dtype):
    offered(run, dtype)
    query, key, value, mask = make_arrays(shape, dtype)
    before = exact_look(query + jnp.asarray(0.3 * np.random.default_rng(5).normal(size=query.shape), dtype), key, mask)
    now = exact_look(query, key, mask)
    old = make_reference(*before[:2])
    attended, drift, new = run(drift_attention, query, key, value, mask, old)
    values = np.repeat(np.asarray(value, np.float64), shape.heads // shape.kv_heads, axis=1)
    expected = np.einsum("bhrm,bhma->brha", now[2], values)
    fine = dtype == "float32"
    np.testing.assert_allclose(np.asarray(attended, np.float64), expected, atol=2e-5 if fine else 2e-2)
    assert attended.dtype == value.dtype
    # Products of bfloat16 are exact in float32, so scores and drift are as good as in float32.
    np.testing.assert_allclose(drift, exact_drift(now, before), atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(new.log_sum, now[1], atol=1e-5)
    valid = np.broadcast_to(np.asarray(mask)[:, None, None, :], now[0].shape)
    scores = np.asarray(new.scores)
    np.testing.assert_allclose(scores[..., : shape.keys][valid], now[0][valid], atol=1e-5)
    assert np.all(scores[..., : shape.keys][~valid] == np.float32(NEGATIVE))
    assert np.all(scores[..., shape.keys :] == np.float32(NEGATIVE)), "room beyond the keys must count for nothing"
    assert np.all(exact_drift(now, before)[-1] > 1e-3), "the test's distributions do not move"


@shapes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_alone(run, shape, dtype):
    offered(run, dtype)
    query, key, value, mask = make_arrays(shape, dtype)
    attended = run(attention, query, key, value, mask)
    weights = exact_look(query, key, mask)[2]
    expected = np.einsum(
        "bhrm,bhma->brha", weights, np.repeat(np.asarray(value, np.float64), shape.heads // shape.kv_heads, 1)
    )
    np.testing.assert_allclose(np.asarray(attended, np.float64), expected, atol=2e-5 if dtype == "float32" else 2e-2)
    assert attended.dtype == value.dtype


def test_odd_number_of_keys(run):
    shape = dataclasses.replace(TINY["ragged"], keys=37)
    if run.name != "mosaic":
        return test_equals_float64(run, shape, "float32")
    with pytest.raises(ValueError, match="M = 37 keys are not a multiple of 8"):
        run(drift_attention, *make_arrays(shape, "bfloat16"), DriftReference.empty(2, 4, 5, 37))


def test_same_look_has_no_drift(run):
    shape = TINY["ragged"]
    offered(run, "bfloat16")
    arrays = make_arrays(shape, "bfloat16")
    _, _, first = run(drift_attention, *arrays, DriftReference.empty(2, 4, 5, 72))
    _, drift, second = run(drift_attention, *arrays, first)
    np.testing.assert_allclose(drift, 0, atol=2e-6)
    np.testing.assert_array_equal(second.scores, first.scores)


def test_all_keys_in_one_part(run, monkeypatch):
    """The loop over a part's tiles of keys, which few keys spread over many processors never enter twice."""
    if run.name != "xla":
        module = importlib.import_module(f"pallas_kernels.drift_attention.{run.name}")
        monkeypatch.setattr(module, "PROGRAMS", 1)
    test_equals_float64(run, dataclasses.replace(TINY["two tiles"], rows=3, heads=2, keys=296), "bfloat16")


def test_refusals():
    query, key, value, mask = make_arrays(TINY["one row"], "float32")
    old = DriftReference.empty(1, 2, 1, 24)
    with pytest.raises(ValueError, match=r"bfloat16, not float32; use implementation=None"):
        drift_attention(query, key, value, mask, old, implementation="mosaic")
    with pytest.raises(ValueError, match=r"compute capability 8\.x .* a cpu without one; use implementation=None"):
        drift_attention(query, key, value, mask, old, implementation="triton")
    with pytest.raises(ValueError, match="implementation='cuda' must be None, 'xla'"):
        drift_attention(query, key, value, mask, old, implementation="cuda")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"make them with DriftReference\.empty"):
        drift_attention(query, key, value, mask, DriftReference.empty(1, 2, 2, 24))
    half = [x.astype(jnp.bfloat16) for x in (query, key, value)]
    with pytest.raises(ValueError, match=r"compute capability 9\.x .* a cpu without one; use implementation=None"):
        drift_attention(*half, mask, old, implementation="mosaic")
    drift_attention(query, key, value, mask, old)  # None never fails
