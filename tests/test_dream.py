"""Dream's sampler: the schedule's numbers, the filters by hand, what is refused (reference runs: test_parity_dream)."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods_table import FAMILIES, KEYS, RAGGED, lively_params, pad, ragged_prompts

from polestar_jax import make_decode, methods
from polestar_jax.block_cache import step_slots
from polestar_jax.filtered import Filtered
from polestar_jax.timesteps import fractions
from polestar_jax.types import Scope, Spec

MODEL = FAMILIES["dream"]
SPEC = make_decode(MODEL, methods.dream(), gen_length=16).spec(1, 4)
MASK = MODEL.config.mask_id


@pytest.mark.parametrize(
    ("steps", "committed"),
    [
        (256, [0, *[1] * 254, 2]),
        (128, [1, *[2] * 126, 3]),
        (8, [31, *[32] * 6, 33]),
        (1, [256]),
    ],
)
def test_masks_per_forward(steps, committed):
    """Of 256 masks, as the torch program truncates."""
    left, found = 256, []
    for share in fractions(steps, 1e-3):
        found.append(int(np.float32(left) * share))
        left -= found[-1]
    assert found == committed


def kept_by_hand(logits, top_p=None, top_k=None):
    """The tokens that the filters leave, one after the other, as sets."""
    able = [token for token in range(len(logits)) if token != MASK]
    if top_p is not None:
        weight = {token: np.exp(logits[token] - max(logits)) for token in able}
        order, total, kept = sorted(able, key=lambda token: -logits[token]), 0.0, []
        for token in order:
            if total > top_p * sum(weight.values()) and kept:
                break
            kept.append(token)
            total += weight[token]
        able = kept
    if top_k is not None:
        least = sorted((logits[token] for token in able), reverse=True)[:top_k][-1]
        able = [token for token in able if logits[token] >= least]
    return set(able)


@pytest.mark.parametrize("filters", [{"top_p": 0.6}, {"top_p": 1e-6}, {"top_k": 5}, {"top_p": 0.7, "top_k": 3}])
def test_filters_equal_the_ones_by_hand(filters):
    logits = np.random.default_rng(0).normal(0, 2, (2, 3, MODEL.config.vocab_size)).astype(np.float32)
    logits[..., MASK] = 9.0  # the likeliest, and yet no candidate
    logits[0, 0, [3, 4, 5]] = 7.0  # ties
    sampler = Filtered(**filters)
    adjusted = np.asarray(sampler.adjust(SPEC, jnp.asarray(logits)))
    token, confidence = sampler.sample(SPEC, jnp.asarray(adjusted), jnp.zeros((2, 3), jnp.int32), KEYS[:2])
    for row, place in np.ndindex(2, 3):
        if (row, place) == (0, 0) and "top_p" in filters:
            continue  # which of equal tokens the nucleus ends with is anybody's choice
        kept = set(np.nonzero(adjusted[row, place] > -1e30)[0])
        assert kept == kept_by_hand(logits[row, place], **filters)
        shares = np.exp(logits[row, place][[*kept]])
        np.testing.assert_allclose(confidence[row, place], shares.max() / shares.sum(), rtol=1e-5)
        assert token[row, place] == max(kept, key=lambda t, at=(row, place): logits[at][t])


def test_nothing_to_filter_is_greedy():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, MODEL.config.vocab_size)), jnp.float32)
    np.testing.assert_array_equal(Filtered().adjust(SPEC, logits), logits)
    np.testing.assert_array_equal(Filtered(temperature=2.0).adjust(SPEC, logits), logits / 2)


def test_tokens_are_drawn_in_proportion():
    logits = jnp.full((1, 1, MODEL.config.vocab_size), -30.0).at[0, 0, :3].set(jnp.log(jnp.asarray([5.0, 3.0, 2.0])))
    sampler, slot = Filtered(temperature=1.0, top_k=2), jnp.full((1, 1), 5, jnp.int32)
    draw = jax.jit(jax.vmap(lambda key: sampler.sample(SPEC, sampler.adjust(SPEC, logits), slot, key[None])[0][0, 0]))
    share = np.bincount(draw(jax.random.split(jax.random.key(0), 4000)), minlength=3) / 4000
    np.testing.assert_allclose(share, [5 / 8, 3 / 8, 0], atol=0.03)


def test_filters_serve_other_methods():
    """The likeliest token alone leaves temperature nothing to choose, and every confidence is 1."""
    method = dataclasses.replace(methods.parallel(threshold=0.9, block_length=4), sampler=Filtered(0.8, top_k=1))
    decode = make_decode(MODEL, method, gen_length=8)
    prompt, params = pad(ragged_prompts("dream"), RAGGED), lively_params(MODEL, 1)
    output, _ = decode(params, decode.init(KEYS, RAGGED), prompt)
    np.testing.assert_array_equal(output.forwards, 2)
    assert output.filled.all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.dream(alg="nonsense"), "alg='nonsense' must be one of"),
        (lambda: methods.dream(alg="origin", alg_temp=0.5), "alg_temp=0.5 has no meaning for alg='origin'"),
        (
            lambda: methods.dream(steps=17),
            "steps=17 must be a multiple of the 1 blocks and between 1 and gen_length=16",
        ),
        (
            lambda: methods.fast_dllm(first_token="entry", steps=6, block_length=4),
            "steps=6 must be a multiple of the 4",
        ),
        (lambda: methods.dream(eps=0.0), "eps=0.0 must be between 0 and 1"),
        (lambda: methods.dream(temperature=-1.0), "temperature=-1.0 must be greater than 0"),
        (lambda: methods.dream(top_p=1.5), "top_p=1.5 must be greater than 0 and at most 1"),
        (lambda: methods.dream(top_k=0), "top_k=0 must be between 1 and"),
        (
            lambda: methods.fast_dllm(first_token="never", block_length=4),
            "first_token='never' must be one of exact, in",
        ),
        (lambda: methods.sparse_dllm(first_token="instead", block_length=4), "'instead' must be one of exact, entry"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_decode(MODEL, make(), gen_length=16)


@pytest.mark.parametrize("habit", ["entry", "instead"])
def test_first_token_habits_need_shifted_logits(habit):
    with pytest.raises(ValueError, match=f"first_token='{habit}' is for models whose logits predict the next position"):
        make_decode(FAMILIES["llada"], methods.fast_dllm(first_token=habit, block_length=4), gen_length=16)


def test_rows_of_a_step_by_hand():
    """Blocks of 4 and of 2 slots, the block's length being 4: all that predict, without the last, without the first."""
    spec = Spec(MODEL, 2, 5, 8, 4, frozenset())
    none, keys = jnp.zeros((2, 13), bool), jax.random.split(jax.random.key(0), 2)
    ends = jnp.array([9, 11]), jnp.array([13, 13])
    scope = Scope(jnp.array([1, 1]), *ends, none, none, none[:, 0], jnp.array([1, 1]), keys)
    found = {habit: step_slots(spec, scope, habit).tolist() for habit in ("exact", "instead", "entry")}
    assert found == {
        "exact": [[8, 9, 10, 11, 12], [10, 11, 12, 13, 13]],
        "instead": [[8, 9, 10, 11], [10, 11, 13, 13]],
        "entry": [[9, 10, 11, 12], [11, 12, 13, 13]],
    }
