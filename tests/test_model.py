"""LLaDA and Dream in Flax against the recorded torch runs, and the properties that every cache policy builds on."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_hf
from models.transformer import Transformer

TOLERANCE = 2e-4
NAMES = ("llada_mha", "llada_gqa", "dream_gqa", "dream_long")
EACH = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def loaded(golden: Path):
    """Model, params and recorded arrays of each checkpoint."""
    return {name: (*load_hf(golden / name), np.load(golden / name / "arrays.npz")) for name in NAMES}


call = jax.jit(Transformer.__call__, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def by_layers(model: Transformer, params, tokens):
    """Inputs of every layer, layer 0's keys and values, logits: by the functions that a cache policy uses."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    hidden, first = [model.embed(params, tokens)], None
    for layer in range(model.config.layers):
        query, key, value = model.project(params, layer, hidden[-1])
        first = first or (key, value)
        query, key = model.rotate(query, positions), model.rotate(key, positions)
        attended = jax.nn.dot_product_attention(query, key, value)
        hidden.append(model.finish(params, layer, hidden[-1], attended))
    return hidden, first, model.logits(params, hidden[-1])


def close(actual, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, rtol=0, atol=tolerance)


@EACH
def test_whole_forward_equals_the_recorded_one(loaded, name: str):
    model, params, recorded = loaded[name]
    logits = call(model, params, jnp.asarray(recorded["forward/ids"])[None])
    assert logits.dtype == jnp.float32
    close(logits, recorded["forward/logits"])


@EACH
def test_every_layer_equals_the_recorded_one(loaded, name: str):
    model, params, recorded = loaded[name]
    tokens = jnp.asarray(recorded["forward/ids"])[None]
    hidden, (key, value), logits = by_layers(model, params, tokens)
    for layer in range(model.config.layers):
        close(hidden[layer], recorded[f"forward/hidden_{layer}"])
    close(logits, recorded["forward/logits"])
    # The original LLaDA caches heads first, the original Dream heads last and merged.
    heads_first = model.config.family == "llada"
    layout = lambda x: jnp.swapaxes(x, 1, 2) if heads_first else x.reshape(*x.shape[:2], -1)
    close(layout(key), recorded["forward/k0_cached"])
    close(layout(value), recorded["forward/v0_cached"])


@pytest.mark.parametrize("name", ["model_a", "model_a_dream"])
def test_model_of_the_comparison_methods(golden: Path, name: str):
    """Every layer's inputs and the logits of the model that their programs ran on."""
    recorded = np.load(golden / "baselines" / name / "arrays.npz")
    hidden, _, logits = by_layers(*load_hf(golden / "baselines" / name), jnp.asarray(recorded["forward/ids"])[None])
    for layer, inputs in enumerate(hidden[:-1]):  # the recorded last one is normalized
        close(inputs[0], recorded[f"forward/hidden_{layer}"])
    close(logits[0], recorded["forward/logits"])


@EACH
def test_last_forward_of_a_recorded_run(loaded, name: str, golden: Path):
    model, params, recorded = loaded[name]
    runs = json.loads((golden / name / "runs.json").read_text())["runs"]
    run = "official_steps=G" if model.config.family == "llada" else "plain_entropy_steps=G"
    tokens = jnp.asarray(runs[run]["input_of_each_forward"][-1], jnp.int32)[None]
    close(call(model, params, tokens)[0], recorded[f"{run}/last_logits"])


@EACH
def test_bfloat16_is_near_float32(golden: Path, loaded, name: str):
    _, _, recorded = loaded[name]
    model, params = load_hf(golden / name, dtype="bfloat16")
    logits = call(model, params, jnp.asarray(recorded["forward/ids"])[None])
    assert logits.dtype == jnp.bfloat16
    wide, narrow = recorded["forward/logits"], np.asarray(logits, np.float32)
    assert np.isfinite(narrow).all()
    assert np.abs(narrow - wide).max() < 0.05 * np.abs(wide).max()
    assert np.abs(narrow - wide).mean() < 0.02 * wide.std()


def test_padding_on_the_left_changes_nothing(loaded):
    model, params, recorded = loaded["llada_gqa"]
    ids = recorded["forward/ids"]
    pads = 7
    tokens = np.concatenate([np.full(pads, model.config.mask_id, np.int32), ids])[None]
    valid = (np.arange(tokens.shape[1]) >= pads)[None]
    logits = call(model, params, jnp.asarray(tokens), jnp.asarray(valid))
    close(logits[:, pads:], recorded["forward/logits"])


def test_rotation_is_undone_by_negative_positions(loaded):
    model, _, _ = loaded["llada_gqa"]
    x = jax.random.normal(jax.random.key(0), (2, 5, 4, 16))
    positions = jnp.asarray([[0, 1, 2, 3, 255], [7, 7, 0, 100, 50]], jnp.int32)
    close(model.rotate(model.rotate(x, positions), -positions), x, 1e-5)
    np.testing.assert_array_equal(model.rotate(x, positions * 0), x)


def test_random_parameters_have_the_tree_that_conversion_makes(loaded):
    for model, params, _ in loaded.values():
        fresh = jax.eval_shape(model.init, jax.random.key(1))
        assert jax.tree.structure(fresh) == jax.tree.structure(params)
        jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), fresh, params)


def test_tied_head_reads_the_embedding(loaded):
    model, params, _ = loaded["llada_mha"]
    tied = Transformer(dataclasses.replace(model.config, tied=True))
    hidden = jax.random.normal(jax.random.key(2), (1, 3, 64))
    shared = {**params, "head": {"weight": params["embedding"]}}
    own = {name: value for name, value in params.items() if name != "head"}
    np.testing.assert_array_equal(tied.logits(own, hidden), model.logits(shared, hidden))
