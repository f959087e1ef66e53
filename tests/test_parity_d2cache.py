"""Recorded runs of d2Cache's public code, for both families: tokens, and commits and rows of every forward."""

import dataclasses

import numpy as np
import pytest
from baselines import assert_as_recorded, recording, replay

from polestar_jax import methods
from polestar_jax.certainty import CertaintyPrior
from polestar_jax.commit import Quota

# What is left of the release when the README's fault (1) is repaired, and when (2) is too.
VARIANTS = {
    "d2_released": {"first_confidence": 1, "narrowed_block": 1},
    "d2_repaired": {"first_confidence": 0, "narrowed_block": 1},
    "d2_repaired_mask_copied": {"first_confidence": 0, "narrowed_block": 0},
}
RULES = ("one_per_step", "threshold", "factor")
FOLDERS = ("d2cache", "d2cache_dream")


def method_of(run: dict, variant: str):
    arguments = run["arguments"]
    method = methods.d2cache(
        "release",
        prior=arguments["sigma"],
        block_length=arguments["block_length"],
        capacity=64,
        **{name: arguments[name] for name in ("threshold", "factor") if name in arguments},
        **run["cache_arguments"],
    )
    # The flags are numbers, so the three variants of a rule are one program.
    return dataclasses.replace(method, cache=dataclasses.replace(method.cache, **VARIANTS[variant]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_recorded_run(folder, rule, variant):
    name = f"{variant}_{rule}"
    run = recording(folder)["runs"][name]
    output, _ = replay(folder, name, method_of(run, variant))
    assert_as_recorded(folder, name, output)
    computed = output.log.computed[0, : run["forwards"]]
    assert [int(rows) for rows in output.log.rows[0, : run["forwards"]]] == run["rows_per_forward"]
    for now, rows in zip(computed[1:], run["rows_of_next_forward"][:-1], strict=True):
        assert np.flatnonzero(now).tolist() == rows


PORTS = {
    "nocache_one_per_step": lambda size, sigma, threshold: dataclasses.replace(
        methods.vanilla(block_length=size), rule=CertaintyPrior(Quota(), sigma)
    ),
    "prefix_threshold": lambda size, sigma, threshold: methods.fast_dllm(
        cache="prefix", threshold=threshold, block_length=size
    ),
    "dual_threshold": lambda size, sigma, threshold: methods.fast_dllm(threshold=threshold, block_length=size),
}


# Its prefix and dual caches on Dream leave out the block's last row, which predicts none of it.
RECORDED_PORTS = [("d2cache_ports", name) for name in PORTS] + [("d2cache_dream", "nocache_one_per_step")]


@pytest.mark.parametrize(("folder", "name"), RECORDED_PORTS)
def test_recorded_port(folder, name):
    """The same decodes without d2Cache, in its authors' frame: the certainty prior, Fast-dLLM's caches."""
    run = recording(folder)["runs"][name]
    arguments = run["arguments"]
    method = PORTS[name](arguments["block_length"], arguments.get("sigma"), arguments.get("threshold"))
    output, _ = replay(folder, name, method)
    assert_as_recorded(folder, name, output)
    assert [int(rows) for rows in output.log.rows[0, : run["forwards"]]] == run["rows_per_forward"]
