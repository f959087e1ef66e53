"""Metrics of hand-made logs, and the record of the environment."""

import json

import numpy as np
import pytest

from polestar_jax.environment import describe_environment, format_environment
from polestar_jax.metrics import (
    Metrics,
    before_eos,
    binomial_error,
    concatenate,
    measure,
    paired_difference,
    summarize,
    tokens_per_forward,
    tokens_per_second,
)
from polestar_jax.types import NO_FORWARD, DecodeOutput, Reason, StepLog

EOS = 9
KINDS = ("step", "refresh", "window entry", "full entry")


def make_output() -> DecodeOutput:
    """Two rows of four positions: the first takes three forwards, the second four and leaves a mask."""
    tokens = np.array([[5, EOS, 6, EOS], [7, 7, 7, 1]])
    filled = np.array([[True, True, True, True], [True, True, True, False]])
    reason = np.zeros((2, 5, 4), np.uint8)
    reason[0, 0, 0], reason[0, 1, 1], reason[0, 1, 2], reason[0, 2, 3] = 1, 2, 3, 4
    reason[1, 0, 0], reason[1, 1, 1], reason[1, 3, 2] = 3, 3, 3
    log = StepLog(
        kind=np.array([[3, 1, 0, NO_FORWARD, NO_FORWARD], [3, 0, 2, 0, NO_FORWARD]], np.uint8),
        rows=np.array([[10, 6, 4, 0, 0], [10, 4, 8, 4, 0]], np.float32),
        rows_executed=np.array([[12, 8, 4, 0, 0], [12, 4, 8, 4, 0]], np.float32),
        token=np.zeros((2, 5, 4), np.int32),
        reason=reason,
        drift=np.zeros((2, 5, 0), np.float32),
        computed=np.zeros((2, 5, 6), np.uint8),
    )
    return DecodeOutput(tokens, filled, np.array([3, 4], np.int32), log)


@pytest.fixture
def metrics() -> Metrics:
    return measure(make_output(), eos_id=EOS, kinds=KINDS)


def test_counts_per_row(metrics: Metrics):
    assert metrics.tokens.tolist() == [2, 3], "EOS and masks do not count, a token after EOS does"
    assert metrics.tokens_to_eos.tolist() == [1, 3]
    assert metrics.positions.tolist() == [4, 3]
    assert metrics.rows.tolist() == [20, 26]
    assert metrics.rows_executed.tolist() == [24, 28]
    counts = {name: counts.tolist() for name, counts in metrics.kinds.items()}
    assert counts == {"step": [1, 2], "refresh": [1, 0], "window entry": [0, 1], "full entry": [1, 1]}
    commits = {name: counts.tolist() for name, counts in metrics.commits.items()}
    assert commits == {"confidence": [1, 0], "drift": [1, 0], "forced": [1, 3], "suffix": [1, 0], "dependency": [0, 0]}
    assert metrics.refreshes.tolist() == [1, 0] and metrics.entries.tolist() == [1, 2]


def test_methods_without_refreshes_and_entries():
    output = make_output()
    metrics = measure(output, eos_id=EOS, kinds=("full",))
    assert metrics.refreshes.tolist() == [0, 0] and metrics.entries.tolist() == [0, 0]


def test_aggregates_are_sums_over_sums(metrics: Metrics):
    many = concatenate([metrics, metrics, metrics])
    assert many.forwards.tolist() == [3, 4] * 3
    assert tokens_per_forward(many) == pytest.approx(5 / 7), "not the mean of 2 / 3 and 3 / 4"
    assert tokens_per_forward(many, to_eos=True) == pytest.approx(4 / 7)
    assert tokens_per_second(many, 2.0) == pytest.approx(15 / 2)
    summary = summarize(many, 2.0)
    assert summary["positions_per_forward"] == pytest.approx(7 / 7)
    assert summary["rows"] == pytest.approx(46 / 7) and summary["rows_executed"] == pytest.approx(52 / 7)
    assert summary["forwards"] == 3.5 and summary["refreshes"] == 0.5 and summary["entries"] == 1.5
    assert summary["commits"] == {"confidence": 0.5, "drift": 0.5, "forced": 2.0, "suffix": 0.5, "dependency": 0.0}
    assert summary["tps"] == 7.5 and summarize(many)["tps"] is None
    assert json.loads(json.dumps(summary)) == summary


def test_what_cannot_be_added_up(metrics: Metrics):
    with pytest.raises(ValueError, match="no decodes"):
        concatenate([])
    with pytest.raises(ValueError, match="different methods"):
        concatenate([metrics, measure(make_output(), eos_id=EOS, kinds=("full",))])


def test_every_reason_has_a_name(metrics: Metrics):
    assert list(metrics.commits) == [reason.name.lower() for reason in Reason if reason]


def test_before_eos():
    assert before_eos(np.array([4, 5, EOS, 6]), EOS).tolist() == [4, 5]
    assert before_eos(np.array([4, 5]), EOS).tolist() == [4, 5]
    assert before_eos(np.array([EOS, 5]), EOS).tolist() == []


def test_errors_of_accuracies():
    assert binomial_error(0.9, 400) == pytest.approx(0.015)
    first, second = np.array([True, True, True, False]), np.array([True, True, False, False])
    assert paired_difference(first, second) == pytest.approx((0.25, 0.25))
    assert paired_difference(first, first) == (0.0, 0.0)
    assert np.isnan(paired_difference(first[:1], second[:1])[1])


def test_environment():
    environment = describe_environment(dtype="float32", command=("polestar", "demo", "--plot", "a b.png"))
    assert environment["command"] == "polestar demo --plot 'a b.png'"
    known = ("date", "polestar_jax", "python", "jax", "jaxlib", "flax", "os", "cpu", "cores", "device", "dtype")
    assert all(environment[name] for name in known)
    assert json.loads(json.dumps(environment)) == environment
    assert all(str(environment[name]) in format_environment(environment) for name in known)
