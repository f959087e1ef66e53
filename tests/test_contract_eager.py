"""Without jit the same decode (contract 4). Slow to dispatch, so one row per method; operations are compiled once."""

import jax
import pytest
from methods_table import (
    ALONE,
    CASES,
    FAMILIES,
    KEYS,
    assert_same_tree,
    decode_once,
    decoder,
    host,
    lively_params,
    pad,
    ragged_prompts,
)

# Nothing that jit could change differs between the families; what only one has is taken from it.
ONCE = {name: (family, name) for family, name in reversed(CASES)}


@pytest.mark.parametrize(("family", "name"), ONCE.values())
def test_eager_equals_jitted(family, name):
    decode, params = decoder(family, name), lively_params(FAMILIES[family], 1)
    prompt = pad(ragged_prompts(family)[1:2], ALONE)
    with jax.disable_jit():
        output, _ = decode(params, decode.init(KEYS[1:2], ALONE), prompt)
    assert_same_tree(host(output), decode_once(family, name, (1,), ALONE), atol=1e-4)
