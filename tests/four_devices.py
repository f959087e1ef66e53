"""Decodes over a mesh of four virtual CPU devices; `test_placement.py` runs this file in a process that has them."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from methods_table import (
    EVERYONE,
    FAMILIES,
    KEYS,
    RAGGED,
    decode_once,
    decoder,
    host,
    lively_params,
    pad,
    ragged_prompts,
)

import convert
from polestar_jax import decode as decoding
from polestar_jax import load
from polestar_jax.placement import bytes_per_device, param_shardings, put_rows_on_mesh
from polestar_jax.prompts import check_prompt

assert jax.device_count() == 4, "run tests/test_placement.py"

NAMES = ("vanilla", "dual", "polestar")
SHAPES = [(2, 2), pytest.param((4, 1), marks=pytest.mark.slow), pytest.param((1, 4), marks=pytest.mark.slow)]


def make_mesh(shape: tuple[int, int]):
    return jax.make_mesh(shape, ("data", "model"))


def placed(family: str, shape: tuple[int, int]):
    """A mesh, and the family's parameters on it."""
    mesh = make_mesh(shape)
    return mesh, jax.device_put(lively_params(FAMILIES[family], 1), param_shardings(FAMILIES[family], mesh))


def assert_same_decode(ours, theirs) -> None:
    """Every decision exactly; measured drifts within rounding, because sums are split."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(host(ours)), jax.tree.leaves(theirs), strict=True):
        if path[-1] == jax.tree_util.GetAttrKey("drift"):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
        else:
            np.testing.assert_array_equal(a, b, err_msg=str(path))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mesh_decodes_as_one_device_does(family: str, name: str, shape: tuple[int, int]):
    """The seed is one at which no decision hangs on the last digits; tokens are compared exactly."""
    mesh, params = placed(family, shape)
    decode, prompt = decoder(family, name), pad(ragged_prompts(family), RAGGED)
    state = fresh = decode.init(KEYS, RAGGED, mesh=mesh)
    layout = [leaf.sharding for leaf in jax.tree.leaves(fresh) if leaf.size]
    compiled = decoding._decode._cache_size()
    for _ in range(2):  # a state that comes back lies where it lay, so that nothing is compiled for it
        given = state
        output, state = decode(params, given, prompt)
        assert_same_decode(output, decode_once(family, name, EVERYONE, RAGGED))
        # Donated: what a decode reads of the old state, its keys and its cache.
        assert all(leaf.is_deleted() for leaf in (given.keys, *jax.tree.leaves(given.cache)[:1]))
        assert not params["embedding"].is_deleted()
        assert [leaf.sharding for leaf in jax.tree.leaves(state) if leaf.size] == layout
    assert decoding._decode._cache_size() <= compiled + 2  # one device's and the mesh's


def test_step_by_step_is_the_same():
    mesh, params = placed("llada", (2, 2))
    decode = decoder("llada", "dual")
    state = decode.start(decode.init(KEYS, RAGGED, mesh=mesh), pad(ragged_prompts("llada"), RAGGED))
    while not decode.finished(state).all():
        state, _ = decode.step(params, state)
    assert_same_decode(decode.output(state), decode_once("llada", "dual", EVERYONE, RAGGED))


def test_each_device_holds_its_part():
    mesh, params = placed("dream", (2, 2))
    model, layer = FAMILIES["dream"], params["layers"][0]
    parts = {
        "query": ((16, 32), (16,)),
        "key": ((8, 32), (8,)),
        "value": ((8, 32), (8,)),
    }
    for name, (weight, bias) in parts.items():
        assert layer[name]["weight"].addressable_shards[0].data.shape == weight
        assert layer[name]["bias"].addressable_shards[0].data.shape == bias
    assert layer["output"]["weight"].addressable_shards[0].data.shape == (32, 16)
    assert layer["down"]["weight"].addressable_shards[0].data.shape == (32, 24)
    assert params["embedding"].addressable_shards[0].data.shape == (20, 32)
    assert params["norm"]["weight"].addressable_shards[0].data.shape == (32,)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    assert held == bytes_per_device(model, mesh) < 0.6 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    state = decoder("dream", "polestar").init(KEYS, RAGGED, mesh=mesh)
    assert state.cache.keys[0].addressable_shards[0].data.shape == (2, 1, RAGGED + 16, 8)
    assert state.log.token.addressable_shards[0].data.shape[0] == 2


def test_key_heads_fewer_than_the_devices_are_on_all_of_them():
    mesh, params = placed("dream", (1, 4))
    layer = params["layers"][0]
    assert layer["key"]["weight"].sharding.is_fully_replicated and layer["key"]["bias"].sharding.is_fully_replicated
    assert layer["query"]["weight"].addressable_shards[0].data.shape == (8, 32)
    state = decoder("dream", "dual").init(KEYS, RAGGED, mesh=mesh)
    assert state.cache.keys[0].sharding.is_fully_replicated


COLLECTIVE = re.compile(r" = (.*?) (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")


@pytest.mark.parametrize(("shape", "largest"), [((4, 1), 1), ((1, 4), 4 * (RAGGED + 16) * 32)], ids=str)
def test_what_devices_tell_each_other(shape: tuple[int, int], largest: int):
    """Over `data` which kind of forward to run, and nothing of the rows; over `model` partial sums, and no cache."""
    mesh, params = placed("llada", shape)
    decode = decoder("llada", "dual")
    state = decode.init(KEYS, RAGGED, mesh=mesh)
    spec = decode._spec_of(state)
    prompt = put_rows_on_mesh(spec, check_prompt(spec, pad(ragged_prompts("llada"), RAGGED)))
    text = decoding._decode.lower(spec, decode.method, params, state, prompt).compile().as_text()
    sizes = [
        int(np.prod([int(size) for size in dims.split(",") if size]))
        for result in COLLECTIVE.findall(text)
        for dims in re.findall(r"\[([\d,]*)\]", result)
    ]
    assert sizes and max(sizes) <= largest


@pytest.mark.parametrize("kind", ["hf", "orbax"])
def test_a_checkpoint_is_loaded_onto_a_mesh(golden: Path, tmp_path: Path, kind: str):
    folder = golden / "dream_gqa"
    model, expected, _ = load(folder)
    if kind == "orbax":
        folder = tmp_path / "orbax"
        convert.convert(golden / "dream_gqa", folder)
    mesh = make_mesh((2, 2))
    same, params, _ = load(folder, mesh=mesh)
    assert same == model
    layout = jax.tree.map(lambda leaf: leaf.sharding, params)
    assert layout == param_shardings(model, mesh)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: make_mesh((4, 1)),
            "a batch of 2 does not split over the 4 devices of 'data': pad it to a multiple of 4",
        ),
        (lambda: jax.make_mesh((2, 2), ("batch", "model")), "axes batch, model: it must have 'data' and 'model'"),
        (lambda: jax.make_mesh((4,), ("data",)), "axes data: it must have"),
    ],
)
def test_meshes_that_cannot_work(make, said: str):
    with pytest.raises(ValueError, match=said):
        decoder("llada", "dual").init(KEYS[:2], RAGGED, mesh=make())


def test_heads_that_do_not_split():
    mesh = jax.make_mesh((1, 3), ("data", "model"), devices=jax.devices()[:3])
    with pytest.raises(ValueError, match="4 attention heads do not split over the 3 devices of 'model'"):
        param_shardings(FAMILIES["llada"], mesh)


def test_parameters_and_state_on_different_devices():
    mesh, params = placed("llada", (2, 2))
    decode, prompt = decoder("llada", "dual"), pad(ragged_prompts("llada"), RAGGED)
    with pytest.raises(ValueError, match=r"the state lies on 4 devices, the parameters on 1 .*param_shardings"):
        decode(lively_params(FAMILIES["llada"], 1), decode.init(KEYS, RAGGED, mesh=mesh), prompt)
    with pytest.raises(ValueError, match=r"pass mesh=\.\.\. to decode\.init"):
        decode(params, decode.init(KEYS, RAGGED), prompt)
