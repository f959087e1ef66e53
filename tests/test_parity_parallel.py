"""Recorded runs of parallel decoders' original programs, commit by commit (contract 6): tests/golden/README.md."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from baselines import arrays, assert_as_recorded, matching, model_of, recording, replay, replays

from polestar_jax import Prompt, make_decode, methods
from polestar_jax.composition import combine
from polestar_jax.prompts import new_canvas
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.shadow import shadowed_outputs


@replays("hierarchy/*")
def test_hierarchy(folder, name):
    given = recording(folder)["runs"][name]["arguments"]
    fields = {
        key: given[key] for key in ("block_length", "threshold", "low_threshold", "remask_threshold") if key in given
    }
    method = methods.hierarchy("release" if name.startswith("decoder") else "paper", **fields)
    assert_as_recorded(folder, name, replay(folder, name, method))


@replays("prophet/*")
def test_prophet(folder, name):
    run = recording(folder)["runs"][name]
    given, start = run["arguments"], len(recording(folder)["prompt"])
    method = methods.prophet(
        answer_start=given["answer_start_pos"] - start,
        steps=given["steps"],
        block_length=given["block_length"],
        **given["early_exit_thresholds"],
    )
    assert_as_recorded(folder, name, replay(folder, name, method, given["constraints"]))


@replays("slowfast/*")
def test_slowfast(folder, name):
    given = recording(folder)["runs"][name]["arguments"]
    method = methods.slowfast(
        "release",
        floor=given["cycle_len_confidence_threshold"],
        threshold=given["high_confidence_threshold"],
        explore=given["k_exploration_steps"],
        window=given.get("cycle_length_stability_window", 2),
        deviation=given.get("cycle_length_stability_std_dev_threshold", 1.0),
        block_length=given["block_length"],
    )
    assert_as_recorded(folder, name, replay(folder, name, method))


@replays("wino/*")
def test_wino(folder, name):
    given = recording(folder)["runs"][name]["arguments"]
    fields = {key: given[key] for key in ("block_length", "threshold", "threshold_back")}
    assert_as_recorded(folder, name, replay(folder, name, methods.wino(**fields)))


@replays("d2cache_ports/wino_*")
def test_wino_of_d2cache(folder, name):
    """`wino_released` is the same with a fault: its block shrinks to what was masked, and masks are left."""
    given = recording(folder)["runs"][name]["arguments"]
    method = methods.wino(
        threshold=given["wide_in_thres"],
        threshold_back=given["narrow_out_thres"],
        bound="now",
        block_length=given["block_length"],
    )
    assert_as_recorded(folder, name, replay(folder, name, method))


@pytest.mark.parametrize(("folder", "name"), matching("wino/*"))
def test_logits_of_the_shadow(folder, name):
    """The last forward's logits, of the canvas and of the shadow."""
    run = recording(folder)["runs"][name]
    model, params = model_of(folder)
    length, size = len(recording(folder)["prompt"]), run["arguments"]["block_length"]
    method = methods.wino(block_length=size)
    spec = make_decode(model, method, gen_length=len(run["output"]) - length).spec(1, length)
    tokens = np.array([run["output"]])
    tokens[0, run["committed_per_forward"][-1]] = model.config.mask_id
    prompt = Prompt(jnp.asarray(tokens[:, :length]), jnp.ones((1, length), bool))
    canvas = dataclasses.replace(new_canvas(spec, prompt), tokens=jnp.asarray(tokens))
    schedule = SemiAutoregressive(block_length=size)
    blocks = dataclasses.replace(schedule.init(spec), index=jnp.array([run["block_per_forward"][-1]]))
    scope = schedule.scope(spec, blocks, canvas, jax.random.split(jax.random.key(0), 1))
    hidden = shadowed_outputs(spec, params, canvas, scope)
    expected = arrays(folder)[f"{name}/last_logits"]
    np.testing.assert_allclose(model.logits(params, hidden)[0], expected, atol=2e-4)


@replays("dpad/*")
def test_dpad(folder, name):
    run = recording(folder)["runs"][name]
    given, start = run["arguments"], len(recording(folder)["prompt"])
    rule = {"threshold": given["threshold"]} if "threshold" in given else {"steps": given["steps"]}
    method = methods.dpad(
        cache=name.split("_")[0],
        stop_at_eos=given["early_termination"],
        block_length=given["block_length"],
        **rule,
    )
    kept = np.zeros((1, given["gen_length"] // given["block_length"], given["gen_length"]), bool)
    for block, places in enumerate(run["kept_suffix_positions_per_block"]):
        kept[0, block, np.array(places, int) - start] = True
    method = dataclasses.replace(method, schedule=dataclasses.replace(method.schedule, kept=jnp.asarray(kept)))
    assert_as_recorded(folder, name, replay(folder, name, method))


@replays("d2cache_ports/klass_d2")
def test_klass_over_d2cache(folder, name):
    """A rule of one program over the cache of another, as d2Cache's own ports ran it."""
    run = recording(folder)["runs"][name]
    cache, given = run["cache_arguments"], run["arguments"]
    fields = {key: cache[key] for key in ("current_k", "rollout_p", "sigma", "inflate_w")}
    size = given["block_length"]
    klass = methods.klass("d2cache", tau_c=given["threshold"], eps_kl=given["kl_threshold"], block_length=size)
    method = combine(methods.d2cache("release", block_length=size, **fields), klass)
    assert_as_recorded(folder, name, replay(folder, name, method))
