"""`polestar sweep`: every setting can be asked for, is decoded, saved and not decoded again."""

import json
from pathlib import Path

import pytest
from methods_table import FAMILIES

from polestar_jax import load, make_decode
from polestar_jax.analysis import drift_study, trace
from polestar_jax.analysis.prompts import cached_method, pick_prompts
from polestar_jax.cli import main
from polestar_jax.commands.method_arguments import parse_method
from polestar_jax.evaluation import measure_points
from polestar_jax.evaluation.sweeps import SWEEPS


@pytest.mark.parametrize("name", SWEEPS)
def test_every_setting_is_a_method(name):
    points = SWEEPS[name].points
    assert sum(point.default for point in points) == 1
    assert len({point.label for point in points}) == len(points)
    for point in points:
        make_decode(FAMILIES["llada"], parse_method(point.method).build(int(8 * point.blocks)), gen_length=48)


def test_a_sweep_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    words = ["sweep", "tau", "--items", "6", "--out", str(tmp_path)]
    assert main(words) == 0, capsys.readouterr().err
    record = json.loads((tmp_path / "tau.json").read_text())
    assert [row["label"] for row in record["rows"]] == ["0.7", "0.9"]
    assert [row["default"] for row in record["rows"]] == [False, True]
    assert record["rows"][0]["forwards"] <= record["rows"][1]["forwards"]
    assert all(row["accuracy"] == sum(row["correct"]) / 6 for row in record["rows"])
    assert (tmp_path / "tau.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(measure_points, "measure_method", None)
    assert main(words) == 0
    assert json.loads((tmp_path / "tau.json").read_text())["rows"] == record["rows"]
    assert all(row["measured"]["date"] for row in record["rows"])
    assert main(["sweep", "colour"]) == 2
    assert "unknown sweep colour; there are components" in capsys.readouterr().err


def test_drift_policies_are_those_of_figure_6a(tmp_path, capsys, monkeypatch):
    words = ["sweep", "drift", "--items", "2", "--out", str(tmp_path)]
    assert main(words) == 0, capsys.readouterr().err
    record = json.loads((tmp_path / "drift.json").read_text())
    assert [row["label"] for row in record["rows"]] == list(drift_study.POLICIES)
    assert [row["default"] for row in record["rows"]] == [True, False, False, False]
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    model, params, tokenizer = load("polestar-tiny")
    traces = [
        trace.record_trace(model, params, cached_method(8), prompt, 48) for prompt in pick_prompts(tokenizer, 2, 0)
    ]
    assert {row["label"]: row["accuracy"] for row in record["rows"]} == drift_study.selection_accuracy(traces)
    monkeypatch.setattr(trace, "record_trace", None)
    assert main(words) == 0
    assert json.loads((tmp_path / "drift.json").read_text())["rows"] == record["rows"]


def test_a_sweep_on_a_benchmark(tmp_path, capsys):
    """With real weights this is the paper's own setting; here two documents that the small model cannot read."""
    file = f"gsm8k={Path(__file__).parent / 'samples' / 'gsm8k_test.jsonl'}"
    words = ["sweep", "tau,drift", "--task", "gsm8k", "--rows", file, "--shots", file, "--limit", "2", "--truncate"]
    words += ["--bucket", "104", "--batch-size", "2", "--block-length", "8", "--out", str(tmp_path)]
    assert main([*words, "--gen-length", "24"]) == 0, capsys.readouterr().err
    record = json.loads((tmp_path / "tau.json").read_text())
    assert record["subject"] == "gsm8k, 2 documents"
    hasty, default = record["rows"]
    assert hasty["documents"] == default["documents"] == 2
    assert hasty["forwards"] <= default["forwards"] <= 24
    assert default["metrics"] == {"gsm8k": "exact_match,strict-match"}
    assert default["rows_per_forward"] * default["forwards"] == pytest.approx(default["rows"])
    drift = json.loads((tmp_path / "drift.json").read_text())
    assert drift["rows"][0]["decodes"] == 2 and 0 < drift["rows"][0]["accuracy"] <= 1
    assert main(words) == 2
    assert "--task gsm8k needs --gen-length and --block-length" in capsys.readouterr().err
