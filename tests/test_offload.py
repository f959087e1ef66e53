"""The window's codes in host memory: the same decode, and nothing but the codes lies there."""

import dataclasses
import functools

import jax
import pytest
from methods_table import (
    ALONE,
    BLOCK_LENGTH,
    FAMILIES,
    GEN_LENGTH,
    KEYS,
    assert_same_tree,
    host,
    lively_params,
    pad,
    ragged_prompts,
)

from polestar_jax import make_decode, methods
from polestar_jax.offload import fetch
from polestar_jax.quantize import FORMATS
from polestar_jax.window import decode_rows

LLADA = FAMILIES["llada"]
PARAMS = lively_params(LLADA, 1)
JITTED = ("nvfp4", "none")


polestar = functools.partial(
    methods.polestar, block_length=BLOCK_LENGTH, tau=0.8, alpha=2.0, suffix_tau=0.5, update_threshold=1
)


@functools.cache
def decoder(offload: str, format: str):
    return make_decode(LLADA, polestar(offload=offload, format=format), gen_length=GEN_LENGTH)


def memory_kinds(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def assert_codes_on_host(state) -> None:
    assert memory_kinds(state.cache.windows.codes) == {"pinned_host"}
    windows = dataclasses.replace(state.cache.windows, codes=None)
    rest = dataclasses.replace(state, cache=dataclasses.replace(state.cache, windows=windows))
    assert memory_kinds(rest) == {"device"}


@functools.cache
def decode_batch(offload: str, format: str):
    """Two ragged rows under jit; output and state."""
    decode = decoder(offload, format)
    output, state = decode(PARAMS, decode.init(KEYS[1:3], ALONE), pad(ragged_prompts("llada")[1:3], ALONE))
    return host(output), state


@pytest.mark.parametrize("format", JITTED)
def test_a_ragged_batch_decodes_the_same(format):
    (plain, plain_state), (offloaded, state) = decode_batch("none", format), decode_batch("host", format)
    assert_same_tree(offloaded, plain)
    assert_same_tree(host(state), host(plain_state))
    assert_codes_on_host(state)
    kinds = plain.log.kind
    assert {0, 1, 2, 3} <= {*kinds.ravel().tolist()}, "every kind of forward must run"


@pytest.mark.parametrize("format", sorted({*FORMATS} - set(JITTED)))
def test_the_other_formats_decode_the_same(format):
    """On one layer and for one capacity, which compile faster."""
    model = dataclasses.replace(LLADA, config=dataclasses.replace(LLADA.config, layers=1))
    prompt = pad(ragged_prompts("llada")[1:3], ALONE)

    def run(offload: str):
        method = polestar(offload=offload, format=format, capacities=(1.0,))
        decode = make_decode(model, method, gen_length=2 * BLOCK_LENGTH)
        output, state = decode(lively_params(model, 1), decode.init(KEYS[1:3], ALONE), prompt)
        return host(output), host(state)

    offloaded = run("host")
    assert (offloaded[0].log.kind == 1).any(), "a refresh must read the codes"
    assert_same_tree(offloaded, run("none"))


def test_a_python_loop_and_a_used_state_decode_the_same():
    output, used = decode_batch("host", "nvfp4")
    decode, prompt = decoder("host", "nvfp4"), pad(ragged_prompts("llada")[1:3], ALONE)
    codes = used.cache.windows.codes[0].values
    state = decode.start(used, prompt)
    decode_batch.cache_clear()  # its state is used up
    assert codes.is_deleted(), "donated, in host memory too"
    assert_codes_on_host(state)
    while not decode.finished(state).all():
        state, _ = decode.step(PARAMS, state)
    assert_codes_on_host(state)
    assert_same_tree(host(decode.output(state)), output)


def test_init_puts_the_codes_alone_in_host_memory():
    for format in FORMATS:
        assert_codes_on_host(decoder("host", format).init(KEYS[:1], 3))
    assert memory_kinds(decoder("none", "nvfp4").init(KEYS[:1], 3)) == {"device"}


def test_codes_that_were_not_fetched_cannot_be_read():
    window = decoder("host", "nvfp4").init(KEYS[:1], 3).cache.windows.layer(0)
    with pytest.raises(ValueError, match="memory_space"):
        jax.eval_shape(lambda window: decode_rows(window, "nvfp4"), window)
    window = dataclasses.replace(window, codes=fetch("host", window.codes))
    assert decode_rows(window, "nvfp4").shape == (1, 3 * BLOCK_LENGTH, LLADA.config.model_size)


def test_an_unknown_place_is_refused():
    with pytest.raises(ValueError, match="offload='disk' must be one of none, host"):
        decoder("disk", "nvfp4")


def test_a_mesh_is_refused():
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    with pytest.raises(ValueError, match="offload='host' is for one device"):
        decoder("host", "nvfp4").init(KEYS[:1], 3, mesh=mesh)
