"""Recorded runs of Dream's and Fast-dLLM's torch programs on Dream, token by token, forward by forward (contract 6)."""

import numpy as np
import pytest
from baselines import assert_logits, decode_with_logits
from test_parity import GOLDEN, load_golden

from polestar_jax import methods
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
    run, prompt = recorded["runs"][run_name], recorded["prompt"]
    gen_length = run["arguments"]["max_new_tokens"]
    method = method_of(run_name, run["arguments"])
    output, _, logits = decode_with_logits(model, params, prompt, method, gen_length)
    np.testing.assert_array_equal(output.tokens[0], run["output"][len(prompt) :])
    forwards = int(output.forwards[0])
    assert forwards == run["forwards"]
    np.testing.assert_array_equal(output.log.rows[0, :forwards], run["rows_per_forward"])
    canvas = np.concatenate([prompt, np.full(gen_length, model.config.mask_id)])
    for forward, fed in enumerate(run["input_of_each_forward"]):
        np.testing.assert_array_equal(canvas[output.log.computed[0, forward] > 0], fed)
        token = np.concatenate([np.full(len(prompt), NOTHING), output.log.token[0, forward]])
        canvas = np.where(token == NOTHING, canvas, token)
    committed = len(prompt) + np.flatnonzero(output.log.token[0, forwards - 1] >= 0)
    expected = np.load(GOLDEN / model_name / "arrays.npz")[f"{run_name}/last_logits"]
    assert_logits(expected, logits, output.log.computed[0, forwards - 1], committed, model.shift)
