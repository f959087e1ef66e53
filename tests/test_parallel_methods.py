"""What the compared parallel decoders must equal, and tokens forced into a generation.

Everything here runs the programs of the contracts with other numbers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods_table import (
    BLOCK_LENGTH,
    EVERYONE,
    FAMILIES,
    GEN_LENGTH,
    KEYS,
    LENGTHS,
    RAGGED,
    decode_once,
    decoder,
    lively_params,
    pad,
    ragged_prompts,
)

from polestar_jax.types import NOTHING, REVOKED

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def decoded(family: str, name: str, forced=None, **numbers):
    """The ragged scenario with other numbers than the table's."""
    decode, prompt = decoder(family, name, **numbers), pad(ragged_prompts(family), RAGGED)
    prompt = dataclasses.replace(prompt, forced=forced)
    output, _ = decode(lively_params(FAMILIES[family], 1), decode.init(KEYS, RAGGED), prompt)
    return jax.tree.map(np.asarray, output)


TWINS = {
    "prophet": ({"early": 1e9, "mid": 1e9, "late": 1e9}, "vanilla"),
    "localleap": ({"relaxed": 0.6}, "parallel"),
    "dpad": ({"scale": 2.5066, "decay": 0.0, "window": GEN_LENGTH}, "parallel"),
    "wino": ({"threshold": 0.6, "threshold_back": 0.0}, "parallel"),
    "freecache": ({"freeze": False}, "parallel"),
}
"""Numbers under which a method is another one of the table (contract 3, and the `twin` of its card)."""


@EVERY_FAMILY
@pytest.mark.parametrize("name", TWINS)
def test_twins(family, name):
    numbers, twin = TWINS[name]
    ours, theirs = decoded(family, name, **numbers), decode_once(family, twin, EVERYONE, RAGGED)
    for field in ("tokens", "forwards"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field), err_msg=field)
    np.testing.assert_array_equal(ours.log.token, theirs.log.token)


@EVERY_FAMILY
@pytest.mark.parametrize(
    "name", ["hierarchy", "dimple", "prophet", "localleap", "dpad", "slowfast", "wino", "freecache"]
)
def test_twins_differ_as_the_table_has_them(family, name):
    """The scenario is one in which every method does something of its own."""
    ours, twin = decode_once(family, name, EVERYONE, RAGGED), TWINS.get(name, ({}, "parallel"))[1]
    theirs = decode_once(family, twin, EVERYONE, RAGGED)
    assert (ours.log.token.shape != theirs.log.token.shape) or (ours.log.token != theirs.log.token).any()


@EVERY_FAMILY
@pytest.mark.parametrize("name", ["wino", "hierarchy"])
def test_tokens_are_taken_back(family, name):
    """The contracts see revocations."""
    assert (decode_once(family, name, EVERYONE, RAGGED).log.token == REVOKED).any()


@EVERY_FAMILY
def test_forced_tokens_stay(family):
    """A forced first block is skipped without a forward, a forced token is seen and never written."""
    forced = np.full((len(LENGTHS), GEN_LENGTH), NOTHING)
    forced[1, :BLOCK_LENGTH] = 7
    forced[:, 9] = np.arange(len(LENGTHS)) + 3
    output = decoded(family, "parallel", forced=jnp.asarray(forced))
    free = decode_once(family, "parallel", EVERYONE, RAGGED)
    np.testing.assert_array_equal(output.tokens[forced != NOTHING], forced[forced != NOTHING])
    assert output.filled.all()
    written = (output.log.token >= 0).any(axis=1)
    np.testing.assert_array_equal(written, forced == NOTHING)
    spent = output.log.kind[1, : output.forwards[1]]
    assert ((output.log.token[1, : len(spent)] >= 0).sum(axis=1) >= 1).all()
    assert (output.tokens[1, BLOCK_LENGTH:] != free.tokens[1, BLOCK_LENGTH:]).any()


@pytest.mark.parametrize(
    ("forced", "words"),
    [
        (np.zeros((1, 3), np.int32), r"shape \(4, 16\)"),
        (np.zeros((4, 16), np.float32), "float32"),
        (np.full((4, 16), 40), "forced token 40 .row 0, generated position 0."),
        (np.full((4, 16), -2), "forced token -2"),
    ],
)
def test_bad_forced_tokens_are_refused(forced, words):
    with pytest.raises(ValueError, match=words):
        decoded("llada", "parallel", forced=jnp.asarray(forced))
