"""The records that are shipped are whole, and are of methods that exist."""

import pytest

from polestar_jax.analysis.figures import pareto_front
from polestar_jax.evaluation.recorded import read_recorded
from polestar_jax.methods import METHODS


@pytest.mark.parametrize("model", ["polestar-tiny", "polestar-tiny-dream"])
def test_a_record_says_what_it_is_of(model):
    recorded = read_recorded(model)
    names = [row["method"] for row in recorded["rows"]]
    assert set(names) <= set(METHODS) and len(set(names)) == len(names) >= 25
    environment = recorded["environment"]
    assert f"--items {recorded['items']} --model {model}" in environment["command"]
    assert all(environment[field] for field in ("date", "revision", "jax", "cpu"))
    for row in recorded["rows"]:
        assert 0 < row["tpf"] < 48 and row["tps"] > 0 and 0 < row["rows"] < 100
        right = row["accuracy"] * recorded["items"]
        assert abs(right - round(right)) < 1e-9
    assert pareto_front(recorded["rows"], "tps")


def test_what_was_not_recorded():
    with pytest.raises(ValueError, match=r"nothing was recorded of 'llada-8b'; `polestar demo"):
        read_recorded("llada-8b")
