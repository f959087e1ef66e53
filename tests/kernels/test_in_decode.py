"""A decode with kernels: the parts that they replace give what XLA's path gives."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_residual_nvfp4 import make_window, same_bits

from models.transformer import Config, Transformer
from pallas_kernels.shapes import TINY
from pallas_kernels.simulation import simulated
from polestar_jax import make_decode, methods
from polestar_jax.drift import as_reference, drift
from polestar_jax.head import Greedy, predict
from polestar_jax.kernels import measure_proxies
from polestar_jax.polestar_step import proxy_attention
from polestar_jax.rows import forward_rows
from polestar_jax.types import Pass, RowSet, Spec
from polestar_jax.window import encode

CONFIG = Config(
    family="llada",
    vocab_size=96,
    model_size=256,
    layers=1,
    heads=4,
    kv_heads=2,
    feed_forward=64,
    max_length=64,
    rope_theta=10000.0,
    epsilon=1e-5,
    mask_id=90,
    eos_id=91,
    dtype="bfloat16",
)
MODEL = Transformer(CONFIG)
SPEC = Spec(MODEL, batch=2, prompt_length=8, gen_length=16, span=8, needs=frozenset({"drift"}))


@pytest.fixture
def kernels(run):
    if run.name == "xla":
        pytest.skip("XLA is what the others are compared with")
    return run.name


def in_simulator(kernels, function):
    with simulated(kernels):
        return jax.tree.map(np.asarray, function(dataclasses.replace(SPEC, kernels=kernels)))


def test_proxies(kernels):
    random = np.random.default_rng(7)
    draw = lambda *size: jnp.asarray(random.normal(size=size), jnp.bfloat16)
    query, key = draw(2, 8, 4, 64), draw(2, 2, 24, 64)
    position = jnp.asarray(np.maximum(np.arange(24) - np.array([[0], [3]]), 0), jnp.int32)
    seen = jnp.asarray(random.random((2, 24)) < 0.8)
    canvas, scope = types.SimpleNamespace(position=position), types.SimpleNamespace(visible=seen)
    policy = methods.polestar(block_length=8).cache
    old = as_reference(proxy_attention(policy, SPEC, draw(2, 8, 4, 64), key, canvas, scope))
    expected = proxy_attention(policy, SPEC, query, key, canvas, scope)
    measure = lambda spec: measure_proxies(spec, query, key, canvas, scope, old, "none")
    score, reference = in_simulator(kernels, measure)
    now = reference.scores[..., :24] - reference.log_sum[..., None]

    loose = 0.15 if kernels == "triton" else 0.02  # Triton's interpreter rounds bfloat16 down
    np.testing.assert_allclose(score, drift(expected, old), atol=loose)
    valid = np.broadcast_to(np.asarray(seen)[:, None, None], now.shape)
    np.testing.assert_allclose(now[valid], np.asarray(expected)[valid], atol=loose)
    assert np.all(now[~valid] < -1e29)
    assert measure_proxies(SPEC, query, key, canvas, scope, old, "none") is None, "None is XLA's path on a CPU"
    named = dataclasses.replace(SPEC, kernels="mosaic")
    assert measure_proxies(named, query, key, canvas, scope, old, "clamp") is None, "no kernel bounds from below"


def test_codes(kernels):
    rows, labels, centroids = make_window(TINY["ragged"], "float32")
    stacked = [jnp.stack([x, x]) for x in (rows, centroids, labels)]
    code = lambda spec: encode(*stacked, "nvfp4", False, spec.kernels)
    for found, expected in zip(
        jax.tree.leaves(in_simulator(kernels, code)), jax.tree.leaves(encode(*stacked, "nvfp4", False)), strict=True
    ):
        same_bits(found, expected)


def test_words(kernels):
    params = MODEL.init(jax.random.key(0))
    hidden = jax.random.normal(jax.random.key(1), (2, 5, 256), jnp.bfloat16)
    slot = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32)[None], (2, 5))
    done = Pass(None, hidden, slot, slot >= 0, {}, slot, jnp.float32(5))
    ask = lambda spec: predict(spec, Greedy(), None, params, done, jax.random.split(jax.random.key(2), 2))
    found = in_simulator(kernels, ask)
    # In float32: bfloat16 logits have ties.
    wide = Transformer(dataclasses.replace(CONFIG, dtype="float32"))
    lone = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    spec = dataclasses.replace(SPEC, model=wide)
    expected = predict(spec, Greedy(), None, lone, done._replace(hidden=hidden.astype(jnp.float32)), None)
    np.testing.assert_array_equal(found.token, expected.token)
    np.testing.assert_allclose(found.confidence, expected.confidence, rtol=2e-2)


def test_rows(kernels):
    """A layer's rows, attended by the kernel against a cache of which some keys are hidden."""
    params, random = MODEL.init(jax.random.key(0)), np.random.default_rng(3)
    cached = [jnp.asarray(random.normal(size=(2, 2, 24, 64)), jnp.bfloat16) for _ in range(2)]
    slot = jnp.asarray([[3, 4, 5, 6, 7], [9, 10, 11, 12, 13]], jnp.int32)
    there = jnp.ones_like(slot, bool)
    rows = RowSet(slot, slot % 7, slot, there, there)
    canvas, seen = types.SimpleNamespace(embeddings=None), jnp.asarray(random.random((2, 24)) < 0.7)
    run = lambda spec, params, cached: forward_rows(spec, params, cached[:1], cached[1:], canvas, rows, seen).output
    found = in_simulator(kernels, lambda spec: run(spec, params, cached)).astype(np.float32)
    # In float32, which XLA multiplies on every CPU.
    wide, cached = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, cached))
    spec = dataclasses.replace(SPEC, model=Transformer(dataclasses.replace(CONFIG, dtype="float32")))
    expected = run(spec, wide, cached)
    np.testing.assert_allclose(found, expected, atol=0.1 if kernels == "triton" else 0.04)
    assert np.abs(expected - MODEL.embed(wide, slot % 7)).max() > 0.3, "the layer adds too little to tell"


def test_refusals():
    decode = make_decode(MODEL, methods.polestar(block_length=8), gen_length=16, kernels="triton")
    state = decode.init(jax.random.split(jax.random.key(0), 1), 8)
    with pytest.raises(ValueError, match=r"drift_attention .*compute capability 8\.x.* or 'xla'"):
        decode(MODEL.abstract_params(), state, np.ones((1, 8), np.int32))
    with pytest.raises(ValueError, match="kernels='cuda' must be None"):
        make_decode(MODEL, methods.polestar(block_length=8), gen_length=16, kernels="cuda")
