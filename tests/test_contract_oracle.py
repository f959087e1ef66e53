"""The jitted Polestar against a decode by hand in float64 NumPy, forward by forward (contract 7).

`oracles/polestar.py` is written from Algorithm 1 and design.md section 5. Weights are seeded so that no decision is
closer than `MARGIN` to going the other way, in which case float32 may not tell.
"""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest
from methods_table import DREAM, TINY, lively_params, pad, prompts_of
from oracles import polestar as oracle

from models.transformer import Transformer
from polestar_jax import make_decode, methods

MARGIN = 1e-4
# A packet in the middle is neither the first nor the last.
LLADA, SHIFTED = (Transformer(dataclasses.replace(config, layers=3)) for config in (TINY, DREAM))
KINDS = ("step", "refresh", "window entry", "full entry")
LENGTHS, LONGEST = (3, 14, 8), 15

NUMBERS = (
    {"tau": 0.8, "alpha": 2.0, "suffix_tau": 0.6, "update_threshold": 1},
    {
        "tau": 0.7,
        "alpha": 1.0,
        "suffix_tau": 0.5,
        "update_threshold": 0,
        "selected": 2,
        "selected_last": 1,
        "history": 2,
        "window_entry_period": 3,
    },
    {},
    {
        "tau": 0.75,
        "alpha": 3.0,
        "suffix_tau": 0.3,
        "update_threshold": 2,
        "step_threshold": 1,
        "history": 0,
        "window_entry_period": 0,
    },
)


@dataclasses.dataclass(frozen=True)
class Program:
    """G, S, the static fields, for each of `NUMBERS` the seeds of weights and prompts, and the model."""

    gen_length: int
    block_length: int
    fields: dict
    seeds: tuple[tuple[int, ...], ...]
    model: Transformer = LLADA

    def settings(self, numbers) -> dict:
        return {"block_length": self.block_length} | self.fields | NUMBERS[numbers]


NARROW = {"format": "nvfp4", "clusters": 4, "prefix_blocks": 1, "suffix_blocks": 2, "iterations": 3}
PROGRAMS = {
    "none": Program(24, 8, {"format": "none"}, ((0, 8), (1, 9), (6,), (3,))),
    "nvfp4": Program(24, 8, {"format": "nvfp4"}, ((8, 16), (1, 9), (10,), (3, 43))),
    "narrow": Program(20, 5, NARROW, ((0, 4), (9,), (10,), (11,))),
    "shifted": Program(24, 8, {"format": "none"}, ((3, 4), (1, 5), (1, 5), (4, 16)), SHIFTED),
}
UNCODED = ("none", "shifted")
SLOW = {
    "wide": Program(32, 16, {"format": "nvfp4"}, ((8, 16), (5, 9), (10,), (7,))),
    "direct": Program(24, 8, {"format": "nvfp4", "residual": False}, ((8,), (1,), (10,), (7,))),
}


@functools.cache
def trace_of(program: str, numbers: int, seed: int, row: int) -> oracle.Decode:
    """The decode by hand of one prompt."""
    chosen = (PROGRAMS | SLOW)[program]
    model, settings = chosen.model, oracle.Settings(**chosen.settings(numbers))
    prompt = prompts_of(model.config, LENGTHS, seed)[row]
    return oracle.Decode(lively_params(model, seed), model.config, prompt, chosen.gen_length, settings).run()


@functools.cache
def decode_of(program: str, numbers: int, seed: int):
    """The library's decode of the three prompts as one ragged batch: output, final keys and values."""
    chosen = (PROGRAMS | SLOW)[program]
    model = chosen.model
    decode = make_decode(model, methods.polestar(**chosen.settings(numbers)), gen_length=chosen.gen_length)
    state = decode.init(jax.random.split(jax.random.key(0), len(LENGTHS)), LONGEST)
    prompts = prompts_of(model.config, LENGTHS, seed)
    output, state = decode(lively_params(model, seed), state, pad(prompts, LONGEST, garbage=seed))
    return jax.tree.map(np.asarray, (output, (state.cache.keys, state.cache.values)))


def cases(programs):
    runs = [(name, i, seed) for name, p in programs.items() for i, seeds in enumerate(p.seeds) for seed in seeds]
    return pytest.mark.parametrize(("program", "numbers", "seed"), runs)


def check_decode(program: str, numbers: int, seed: int) -> None:
    output, _ = decode_of(program, numbers, seed)
    for row, length in enumerate(LENGTHS):
        trace = trace_of(program, numbers, seed, row)
        assert min(trace.margins.values()) > MARGIN, f"choose another seed: {trace.margins}"
        spent = int(output.forwards[row])
        assert [KINDS[kind] for kind in output.log.kind[row, :spent]] == [f.kind for f in trace.forwards]
        np.testing.assert_array_equal(output.tokens[row], trace.tokens[length:])
        for forward, expected in enumerate(trace.forwards):
            log = jax.tree.map(lambda leaf, row=row, forward=forward: leaf[row, forward], output.log)
            assert {length + i: token for i, token in enumerate(log.token) if token >= 0} == expected.tokens
            assert {length + i: reason for i, reason in enumerate(log.reason) if reason} == expected.reasons
            np.testing.assert_array_equal(log.computed[LONGEST - length :], expected.computed)
            np.testing.assert_allclose(log.rows, expected.computed.sum() / LLADA.config.layers, rtol=1e-6)
            drift = [expected.drift.get(length + i, np.nan) for i in range(len(log.drift))]
            np.testing.assert_allclose(log.drift, drift, atol=2e-5 if program in UNCODED else 1e-3)


@cases(PROGRAMS)
def test_decode_equals_the_one_by_hand(program, numbers, seed):
    check_decode(program, numbers, seed)


@cases({name: PROGRAMS[name] for name in UNCODED})
def test_cache_equals_the_one_by_hand(program, numbers, seed):
    """Every key and value, also of rows that decided nothing; the library keeps them heads first and rotated."""
    _, caches = decode_of(program, numbers, seed)
    for row, length in enumerate(LENGTHS):
        trace = trace_of(program, numbers, seed, row)
        keys = [trace.model.rotate(layer, np.arange(trace.length)) for layer in trace.keys]
        for ours, theirs in zip(caches, (keys, trace.values), strict=True):
            for layer in range(LLADA.config.layers):
                found = ours[layer][row, :, LONGEST - length :].swapaxes(0, 1)
                np.testing.assert_allclose(found, theirs[layer], atol=1e-4)


@pytest.mark.slow
@cases(SLOW)
def test_other_shapes_and_formats(program, numbers, seed):
    check_decode(program, numbers, seed)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_cases_are_worth_it(program):
    """Every kind of forward and every reason occurs, blocks are skipped before others, EOS is committed."""
    chosen, seen = PROGRAMS[program], collections.Counter()
    for numbers, seeds in enumerate(chosen.seeds):
        for seed in seeds:
            for row, length in enumerate(LENGTHS):
                trace = trace_of(program, numbers, seed, row)
                seen.update(forward.kind for forward in trace.forwards)
                seen.update(reason for forward in trace.forwards for reason in forward.reasons.values())
                entered = {forward.block for forward in trace.forwards}
                seen["skipped"] += len(set(range(max(entered))) - entered)
                seen["eos"] += int((trace.tokens[length:] == LLADA.config.eos_id).sum())
    assert all(seen[what] > 3 for what in (*KINDS, 1, 2, 3, 4)), seen
    assert seen["eos"] > 0 and seen["skipped"] > 0, seen
