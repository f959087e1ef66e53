"""Recorded runs of Dream's and Fast-dLLM's torch programs on Dream, token by token, forward by forward (contract 6)."""

import jax
import numpy as np
import pytest
from test_parity import load_golden

from polestar_jax import make_decode, methods
from polestar_jax.types import NOTHING

MODELS = ("dream_gqa", "dream_long")


def method_of(name: str, arguments: dict):
    """Our method for a recorded run, from the arguments of the original function."""
    kind, threshold, block_length = name.split("_")[0], arguments.get("threshold"), arguments.get("block_length")
    if kind == "plain":
        confident = {} if threshold is None else {"threshold": threshold}
        return methods.dream(alg=arguments["alg"], steps=arguments["steps"], **confident)
    if kind in ("prefix", "dual"):
        rule = {"steps": arguments["steps"]} if threshold is None else {"threshold": threshold}
        return methods.fast_dllm(cache=kind, first_token="entry", block_length=block_length, **rule)
    assert name.startswith("later_blockwise_nocache")
    return methods.parallel(threshold=threshold, block_length=block_length)


def cases():
    for name in MODELS:
        yield from ((name, run) for run in load_golden(name)[2]["runs"])


@pytest.mark.parametrize(("model_name", "run_name"), list(cases()))
def test_recorded_run(model_name, run_name):
    model, params, recorded = load_golden(model_name)
    run, prompt = recorded["runs"][run_name], np.array([recorded["prompt"]])
    gen_length = run["arguments"]["max_new_tokens"]
    decode = make_decode(model, method_of(run_name, run["arguments"]), gen_length=gen_length)
    output, _ = decode(params, decode.init(jax.random.split(jax.random.key(0), 1), prompt.shape[1]), prompt)
    np.testing.assert_array_equal(output.tokens[0], run["output"][prompt.shape[1] :])
    forwards = int(output.forwards[0])
    assert forwards == run["forwards"]
    np.testing.assert_array_equal(output.log.rows[0, :forwards], run["rows_per_forward"])
    canvas = np.concatenate([prompt[0], np.full(gen_length, model.config.mask_id)])
    for forward, fed in enumerate(run["input_of_each_forward"]):
        np.testing.assert_array_equal(canvas[output.log.computed[0, forward] > 0], fed)
        token = np.concatenate([np.full(prompt.shape[1], NOTHING), output.log.token[0, forward]])
        canvas = np.where(token == NOTHING, canvas, token)
