"""Proxy drift against float64, in every implementation."""

import dataclasses
import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from test_drift_attention import exact_drift, exact_look, make_reference, offered

from pallas_kernels.drift_reference import NEGATIVE
from pallas_kernels.proxy_drift import proxy_drift
from pallas_kernels.shapes import TINY

shapes = pytest.mark.parametrize("shape", TINY.values(), ids=TINY)


@shapes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_float64(run, shape, dtype):
    offered(run, dtype)
    random = np.random.default_rng(3)
    rounded = lambda x: np.asarray(jnp.asarray(x, dtype), np.float64)
    query = rounded(2 * random.normal(size=(shape.batch, shape.clusters, shape.heads, shape.head_size)))
    plain = random.normal(size=(shape.batch, shape.kv_heads, shape.keys, shape.head_size))
    position = np.maximum(np.arange(shape.keys) - random.integers(0, 4, (shape.batch, 1)), 0)
    half = shape.head_size // 2
    angle = position[..., None] * 10000.0 ** (-np.arange(half) / half)
    cosine, sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    turn = np.cos(angle)[:, None], np.sin(angle)[:, None]
    low, high = plain[..., :half], plain[..., half:]
    key = rounded(np.concatenate([low * turn[0] - high * turn[1], high * turn[0] + low * turn[1]], -1))
    # What the op should see: the cached keys turned back, rounded as it does.
    low, high = key[..., :half], key[..., half:]
    seen = np.concatenate([low * turn[0] + high * turn[1], high * turn[0] - low * turn[1]], -1)
    assert np.abs(seen - plain).max() < 5e-2, "turning back is wrong in the test"
    mask = random.random((shape.batch, shape.keys)) < 0.6
    mask[0] = False
    mask[0, shape.keys // 2] = True  # one valid key
    if shape.batch == 1:
        mask[:, ::2] = True
    now = exact_look(query, rounded(seen), mask)
    before = exact_look(query + 0.3 * random.normal(size=query.shape), plain, mask)
    drift, new = run(
        proxy_drift,
        jnp.asarray(query, dtype),
        jnp.asarray(key, dtype),
        jnp.asarray(cosine),
        jnp.asarray(sine),
        jnp.asarray(mask),
        make_reference(*before[:2]),
    )
    # A key that falls between two bfloat16 may be rounded to either by float32 and float64 (Triton's interpreter
    # always rounds down); that moves scores.
    atol = 2e-5 if dtype == "float32" else 0.1 if run.name == "triton" else 2e-2
    np.testing.assert_allclose(drift, exact_drift(now, before), atol=atol, rtol=1e-5)
    valid = np.broadcast_to(mask[:, None, None, :], now[0].shape)
    scores = np.asarray(new.scores)[..., : shape.keys]
    np.testing.assert_allclose(scores[valid], now[0][valid], atol=atol)
    assert np.all(scores[~valid] == np.float32(NEGATIVE))
    np.testing.assert_allclose(new.log_sum, now[1], atol=atol)
    assert np.all(exact_drift(now, before)[-1] > 1e-2), "the test's distributions do not move"


def test_all_keys_in_one_part(run, monkeypatch):
    """The loop over a part's tiles of keys."""
    if run.name != "xla":
        module = importlib.import_module(f"pallas_kernels.proxy_drift.{run.name}")
        monkeypatch.setattr(module, "PROGRAMS", 1)
    test_equals_float64(run, dataclasses.replace(TINY["ragged"], batch=1, heads=2, keys=296), "bfloat16")
