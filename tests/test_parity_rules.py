"""Recorded runs of KLASS, DAWN, AdaBlock and d2Cache's ports, commit by commit (contract 6): tests/golden/README.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from baselines import arrays, assert_as_recorded, model_of, recording, replay, replays

from polestar_jax import make_decode, methods
from polestar_jax.no_cache import NoCache
from polestar_jax.types import Prompt


def klass_of(arguments, name):
    length, steps = arguments.get("gen_length", arguments.get("max_new_tokens")), arguments["steps"]
    return methods.klass(
        "release" if "block_length" in arguments else "dream",
        tau_c=arguments["conf_threshold"],
        eps_kl=arguments["kl_threshold"],
        history=arguments["kl_history_length"],
        strategy=arguments.get("unmask_strategy", "all"),
        steps=None if steps == length else steps,
        block_length=arguments.get("block_length"),
    )


def dawn_of(arguments, name):
    return methods.dawn(
        "release",
        attention_layers=2,
        block_length=arguments["block_length"],
        tau_low=arguments.get("tau_low", arguments.get("conf_threshold")),
        **{each: arguments[each] for each in ("tau_sink", "tau_edge", "tau_induce")},
    )


def adablock_of(arguments, name):
    return methods.adablock(
        cache=name.split("_")[0],
        first_token="entry" if arguments.get("dual_cache") else "exact",
        threshold=arguments["threshold"],
        delimiter_threshold=float(arguments["delimiter_threshold"]),
        delimiters=tuple(arguments["delimiter_ids"]),
        block_length=arguments.get("init_block_length", arguments.get("block_length")),
    )


def port_of(arguments, name):
    """d2Cache's ports of other rules."""
    block_length = arguments["block_length"]
    if "gamma" in arguments:
        return methods.entropy_bound(release=True, gamma=arguments["gamma"], block_length=block_length)
    return methods.klass(
        "d2cache",
        cache="dual" if name.endswith("dual") else "none",
        tau_c=arguments["threshold"],
        eps_kl=arguments["kl_threshold"],
        history=arguments["kl_history_length"],
        block_length=block_length,
    )


FOLDERS = {
    "klass": klass_of,
    "klass_dream": klass_of,
    "dawn": dawn_of,
    "dawn_dream": dawn_of,
    "adablock": adablock_of,
    "adablock_dream": adablock_of,
    "d2cache_ports": port_of,
}


def method_of(folder: str, name: str):
    return FOLDERS[folder](recording(folder)["runs"][name]["arguments"], name)


@replays(
    *(f"{folder}/*" for folder in FOLDERS if folder != "d2cache_ports"),
    *(f"d2cache_ports/{name}" for name in ("nocache_eb_sampler", "klass_nocache", "klass_dual")),
)
def test_recorded_run(folder, name):
    assert_as_recorded(folder, name, replay(folder, name, method_of(folder, name)))


def started(folder: str, name: str):
    """The decode of a recorded run, its parameters and its state before the first forward."""
    arguments, (model, params) = recording(folder)["runs"][name]["arguments"], model_of(folder)
    length = arguments.get("gen_length", arguments.get("max_new_tokens"))
    decode = make_decode(model, method_of(folder, name), gen_length=length)
    prompt = jnp.array([recording(folder)["prompt"]])
    state = decode.init(jax.random.split(jax.random.key(0), 1), prompt.shape[1])
    return decode, params, state, Prompt(prompt, jnp.ones(prompt.shape, bool))


@pytest.mark.parametrize("folder", ["dawn", "dawn_dream"])
def test_recorded_attention(folder):
    """Who attends to whom and what a slot receives in the first forward: by position, whoever predicts it."""
    decode, params, state, prompt = started(folder, "B16_repaired")
    state = decode.start(state, prompt)
    spec = decode.spec(1, prompt.tokens.shape[1])
    scope = decode.method.schedule.scope(spec, state.schedule, state.canvas, state.keys)
    (branch,) = decode.method.cache.branches(spec)
    done = jax.jit(branch.run)(params, (), state.canvas, scope, jnp.array([True]))
    block = slice(spec.prompt_length, spec.prompt_length + spec.span)
    expected = arrays(folder)["B16_repaired/mean_attention_first"][block]
    # The row before the block is not at a predicted position; it predicts the block's first.
    np.testing.assert_allclose(done.extra["attention"][0, : spec.span], expected, atol=1e-5)
    received = arrays(folder)["B16_repaired/mean_attention_column_means"][0]
    np.testing.assert_allclose(done.planes["attention_received"][0], received, atol=1e-5)
    # Dream's sampler takes the softmax of the 50 likeliest tokens: a little more than that of all 200.
    tolerance = 1e-3 if folder == "dawn_dream" else 1e-5
    confidence = arrays(folder)["B16_repaired/confidence"][0]
    np.testing.assert_allclose(done.planes["slot_confidence"][0], confidence, atol=tolerance)


def test_no_signal_costs_nothing_unasked():
    """A rule that asks for no attention gets none."""
    assert "attention" in NoCache().provides
    model, params = model_of("dawn")
    decode = make_decode(model, methods.parallel(block_length=16), gen_length=32)
    prompt = jnp.array([recording("dawn")["prompt"]])
    state = decode.start(decode.init(jax.random.split(jax.random.key(0), 1), prompt.shape[1]), prompt)
    spec = decode.spec(1, prompt.shape[1])
    scope = decode.method.schedule.scope(spec, state.schedule, state.canvas, state.keys)
    run = decode.method.cache.branches(spec)[0].run
    done = jax.eval_shape(run, params, (), state.canvas, scope, jnp.array([True]))
    assert not done.extra and not done.planes
