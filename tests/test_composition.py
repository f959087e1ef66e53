"""Methods put together from two: the cache of one, the commit rule of the other."""

import dataclasses

import jax
import numpy as np
import pytest
from methods_table import EVERYONE, FAMILIES, KEYS, RAGGED, decode_once, lively_params, pad, ragged_prompts

from polestar_jax import make_decode, methods
from polestar_jax.commands.method_arguments import describe_method, parse_method, parse_methods
from polestar_jax.commit import FirstTokenAtEntry, Threshold
from polestar_jax.composition import combine
from polestar_jax.methods.localleap import LocalLeap


def decode(family: str, method):
    """The ragged scenario of the contracts."""
    decoder = make_decode(FAMILIES[family], method, gen_length=16)
    output, _ = decoder(
        lively_params(FAMILIES[family], 1), decoder.init(KEYS, RAGGED), pad(ragged_prompts(family), RAGGED)
    )
    return jax.tree.map(np.asarray, output)


def test_parts_come_from_where_they_should():
    polestar, slowfast = methods.polestar(block_length=16), methods.slowfast(block_length=8)
    combined = combine(polestar, slowfast)
    assert combined.name == "polestar+slowfast"
    assert combined.cache is polestar.cache
    assert (combined.rule, combined.schedule, combined.sampler) == (
        slowfast.rule,
        slowfast.schedule,
        slowfast.sampler,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_method_is_the_combination_of_its_parts(family):
    """Fast-dLLM's cache under the rule of `parallel` is Fast-dLLM: the same program, in fact."""
    combined = combine(methods.fast_dllm(block_length=4), methods.parallel(threshold=0.6, block_length=4))
    expected, output = decode_once(family, "dual", EVERYONE, RAGGED), decode(family, combined)
    for name in ("tokens", "forwards"):
        np.testing.assert_array_equal(getattr(output, name), getattr(expected, name))
    np.testing.assert_array_equal(output.log.token, expected.log.token)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rule_over_another_cache(family):
    """Hierarchy over Fast-dLLM's cache: entries and steps of the one, commits of the other (many in one forward)."""
    combined = combine(methods.fast_dllm(block_length=4), methods.hierarchy(low_threshold=0.1, block_length=4))
    output = decode(family, combined)
    assert output.filled.all()
    assert (output.forwards < decode(family, methods.fast_dllm(threshold=0.9, block_length=4)).forwards).any()
    spent = np.arange(output.log.kind.shape[1]) < output.forwards[:, None]
    assert set(np.unique(output.log.kind[spent])) == {0, 1}


def test_the_first_tokens_habit_goes_with_the_cache():
    habit = methods.fast_dllm(first_token="entry")
    assert combine(habit, methods.localleap()).rule == FirstTokenAtEntry(LocalLeap(0.9, 0.75, 4))
    assert combine(methods.polestar(), habit).rule == Threshold(0.9)
    assert combine(habit, methods.fast_dllm(first_token="entry", threshold=0.5)).rule == FirstTokenAtEntry(
        Threshold(0.5)
    )


@pytest.mark.parametrize(
    ("cache_from", "rule_from", "words"),
    [
        (methods.fast_dllm(), methods.prophet(), r"fast_dllm\+prophet: the commit rule of prophet needs generation"),
        (methods.parallel(), methods.wino(), r"parallel\+wino: .* needs shadow, which the cache policy of parallel"),
        (methods.fast_dllm(), methods.polestar(), r"fast_dllm\+polestar: .* needs drift, suffix"),
        (methods.wino(), methods.prophet(), r"wino\+prophet: .* needs generation"),
        (methods.polestar(), methods.vanilla(guidance=1.5), "guidance=1.5 runs without a cache or with Fast-dLLM's"),
        (methods.parallel(guidance=1.0), methods.vanilla(guidance=1.5), "guidance=1.0 and guidance=1.5 disagree"),
    ],
)
def test_impossible_pairs_are_refused_by_name(cache_from, rule_from, words):
    with pytest.raises(ValueError, match=words):
        combine(cache_from, rule_from)


def test_guidance_stays():
    assert combine(methods.fast_dllm(), methods.vanilla(guidance=1.5)).guidance == 1.5
    assert combine(methods.fast_dllm(guidance=0.5), methods.vanilla()).guidance == 0.5


def test_words():
    choice = parse_method("polestar:format=none + slowfast:release:threshold=0.8")
    assert (choice.name, choice.label) == ("polestar+slowfast", "polestar:format=none+slowfast:release:threshold=0.8")
    expected = combine(
        methods.polestar(format="none", block_length=8), methods.slowfast("release", threshold=0.8, block_length=8)
    )
    assert dataclasses.replace(choice.build(8), name=expected.name) == expected
    blocks = describe_method(choice.build(8))["schedule"]["blocks"]
    assert (blocks["type"], blocks["block_length"]) == ("SemiAutoregressive", 8)
    labels = [choice.label for choice in parse_methods("vanilla,fast_dllm:cache=prefix+hierarchy, polestar+wino")]
    assert labels == ["vanilla", "fast_dllm:cache=prefix+hierarchy", "polestar+wino"]


def test_a_plus_may_belong_to_a_number():
    choice = parse_method("polestar:tau=+inf:alpha=1e+2")
    assert choice.build(8).rule.tau == float("inf") and choice.build(8).rule.alpha == 100.0


def test_settings_go_to_the_method_that_has_the_field():
    choice = parse_method("fast_dllm+localleap", ["radius=2", "cache=prefix"])
    built = choice.build(8)
    assert built.rule.radius == 2 and built.cache.mode == "prefix"


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("polestar+vanila", [], "unknown method 'vanila'"),
        ("vanilla+parallel+wino", [], "joins 3 methods"),
        ("fast_dllm+parallel", ["threshold=0.5"], "both fast_dllm and parallel have the field 'threshold'"),
        ("fast_dllm+parallel", ["tau=0.5"], "neither fast_dllm nor parallel has the field 'tau'"),
    ],
)
def test_bad_words_are_refused(text, settings, words):
    with pytest.raises(ValueError, match=words):
        parse_method(text, settings)
