"""Recorded runs of KLASS, DAWN, AdaBlock and d2Cache's ports, reproduced commit by commit (contract 6).

One row of four layers: un-jitted, so that no run compiles a program of its own.
"""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from convert import load_hf
from polestar_jax import make_decode, methods

BASELINES = pathlib.Path(__file__).parent / "golden" / "baselines"


@functools.cache
def recorded(folder: str):
    return json.loads((BASELINES / folder / "runs.json").read_text())


@functools.cache
def loaded(name: str):
    return load_hf(BASELINES / name)


def klass_of(arguments, name):
    dream = "steps" in arguments and "block_length" not in arguments
    steps, length = arguments["steps"], arguments.get("gen_length", arguments.get("max_new_tokens"))
    return methods.klass(
        "dream" if dream else "release",
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
    """d2Cache's ports of other methods."""
    block_length = arguments["block_length"]
    if "gamma" in arguments:
        return methods.entropy_bound(release=True, gamma=arguments["gamma"], block_length=block_length)
    cache = name.split("_")[1 if name.startswith("klass") else 0].replace("nocache", "none")
    if "kl_threshold" in arguments:
        return methods.klass(
            "d2cache",
            cache=cache,
            tau_c=arguments["threshold"],
            eps_kl=arguments["kl_threshold"],
            history=arguments["kl_history_length"],
            block_length=block_length,
        )
    return methods.fast_dllm(cache=cache, threshold=arguments["threshold"], block_length=block_length)


METHOD_OF = {"klass": klass_of, "dawn": dawn_of, "adablock": adablock_of, "d2cache_ports": port_of}
FOLDERS = [
    folder + family for family in ("", "_dream") for folder in METHOD_OF if (BASELINES / (folder + family)).exists()
]
OTHERS = ("d2", "dllm", "wino", "nocache_one_per_step")  # of other methods' tests


def cases():
    for folder in FOLDERS:
        for run in recorded(folder)["runs"]:
            # DAWN's position 0 is a fault; the recorded repair is the contract.
            if not run.endswith("_released") and not any(word in run for word in OTHERS if "d2cache" in folder):
                yield folder, run


@pytest.mark.parametrize(("folder", "name"), list(cases()))
def test_recorded_run(folder, name):
    files = recorded(folder)
    run, prompt = files["runs"][name], np.array([files["prompt"]])
    arguments = run["arguments"]
    model, params = loaded(files["model"])
    method = METHOD_OF[folder.removesuffix("_dream")](arguments, name)
    length = arguments.get("gen_length", arguments.get("max_new_tokens"))
    decode = make_decode(model, method, gen_length=length)
    with jax.disable_jit():
        output, _ = decode(params, decode.init(jax.random.split(jax.random.key(0), 1), prompt.shape[1]), prompt)
    log = output.log
    forwards = int(output.forwards[0])
    committed = [list(np.nonzero(np.asarray(log.token[0, i] >= 0))[0] + prompt.shape[1]) for i in range(forwards)]
    assert committed == run["committed_per_forward"]
    np.testing.assert_array_equal(output.tokens[0], run["output"][prompt.shape[1] :])
    assert forwards == run["forwards"]
    np.testing.assert_array_equal(log.rows[0, :forwards], run["rows_per_forward"])
    assert (~output.filled).sum() == run.get("masks_left", 0)
