"""`polestar sweep`: every setting can be asked for, is decoded, saved and not decoded again."""

import json

import pytest
from methods_table import FAMILIES

from polestar_jax import make_decode
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
    assert main(["sweep", "colour"]) == 2
    assert "unknown sweep colour; there are components" in capsys.readouterr().err
