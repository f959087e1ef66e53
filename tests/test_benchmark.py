"""Replayed commits, and the commands that measure and plan."""

import importlib.util
import json

import jax
import numpy as np
import pytest
from methods_table import BLOCK_LENGTH, FAMILIES, GEN_LENGTH

from polestar_jax import benchmark, methods
from polestar_jax.cli import main
from polestar_jax.replay import count_forwards, draw_counts


def test_forwards_of_replayed_commits():
    assert count_forwards(np.array([3, 3, 3, 5, 1]), gen_length=8, block_length=4) == 4
    assert count_forwards(np.ones(8, int), gen_length=8, block_length=4) == 8
    assert draw_counts(1.0, 5, seed=0).tolist() == [1] * 5
    assert draw_counts(3.67, 20_000, seed=0).mean() == pytest.approx(3.67, rel=0.02)


def test_a_round_runs_the_replayed_forwards_and_counts_their_kinds():
    model = FAMILIES["llada"]
    params = model.init(jax.random.key(0))
    shape = benchmark.Shape({}, prompt_length=6, gen_length=GEN_LENGTH, block_length=BLOCK_LENGTH)
    timing = benchmark.prepare(model, shape, "dual", methods.fast_dllm(block_length=BLOCK_LENGTH), 2.0, seed=1)
    benchmark.run_round(timing, params, np.full((1, 6), 5))
    assert sum(timing.kind_forwards.values()) == timing.forwards
    assert timing.kind_forwards["entry"] == GEN_LENGTH // BLOCK_LENGTH
    summary = json.loads(json.dumps(benchmark.summarise(timing, shape)))
    assert summary["positions_per_forward"] == GEN_LENGTH / timing.forwards
    assert 0 < summary["entry_share"] < 1 and summary["tps"] > 0
    steps = timing.forwards - timing.kind_forwards["entry"]
    rows = (timing.kind_forwards["entry"] * (6 + GEN_LENGTH) + steps * BLOCK_LENGTH) / timing.forwards
    assert timing.rows == pytest.approx(rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "--rounds", "0"], "--rounds 0"),
        (["bench", "--methods", "nope"], "unknown method 'nope'"),
        (["plan", "--model", "gpt-2"], "'gpt-2' must be one of llada-8b"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="the CUDA wheels are here")
def test_plan_without_the_cuda_wheels_says_how_to_get_them(capsys):
    assert main(["plan"]) == 2
    assert "uv sync --extra cuda13" in capsys.readouterr().err
