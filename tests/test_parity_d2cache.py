"""Recorded runs of d2Cache's public code, for both families: tokens, and commits and rows of every forward."""

import dataclasses

import numpy as np
from baselines import assert_as_recorded, recording, replay, replays

from polestar_jax import methods
from polestar_jax.certainty import CertaintyPrior
from polestar_jax.commit import Quota

# What is left of the release when the README's fault (1) is repaired, and when (2) is too.
VARIANTS = {
    "d2_released": {"first_confidence": 1, "narrowed_block": 1},
    "d2_repaired": {"first_confidence": 0, "narrowed_block": 1},
    "d2_repaired_mask_copied": {"first_confidence": 0, "narrowed_block": 0},
}


def method_of(run: dict, name: str):
    arguments, variant = run["arguments"], max((each for each in VARIANTS if name.startswith(each)), key=len)
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


@replays("d2cache/*", "d2cache_dream/d2_*")
def test_recorded_run(folder, name):
    run = recording(folder)["runs"][name]
    replayed = replay(folder, name, method_of(run, name))
    assert_as_recorded(folder, name, replayed)
    computed = replayed.output.log.computed[0, : run["forwards"]]
    for now, rows in zip(computed[1:], run["rows_of_next_forward"][:-1], strict=True):
        assert np.flatnonzero(now).tolist() == rows


FRAME = ("d2cache_ports", "d2cache_dream")


def port_of(folder: str, name: str):
    """The same frame without d2Cache: the certainty prior, or Fast-dLLM's caches."""
    arguments = recording(folder)["runs"][name]["arguments"]
    size = arguments["block_length"]
    if name == "nocache_one_per_step":
        return dataclasses.replace(methods.vanilla(block_length=size), rule=CertaintyPrior(Quota(), arguments["sigma"]))
    return methods.fast_dllm(
        cache=name.split("_")[0],
        threshold=arguments["threshold"],
        first_token="instead" if folder == "d2cache_dream" else "exact",
        block_length=size,
    )


@replays(*(f"{folder}/{name}_*" for folder in FRAME for name in ("nocache_one", "prefix", "dual")))
def test_recorded_port(folder, name):
    assert_as_recorded(folder, name, replay(folder, name, port_of(folder, name)))
