"""Traces and figures: the definitions by hand, and the command as a user runs it."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from methods_table import FAMILIES, lively_params

from polestar_jax import methods
from polestar_jax.analysis import drift_study, figures
from polestar_jax.analysis.costs import state_bytes
from polestar_jax.analysis.labels import place_labels
from polestar_jax.analysis.parts import time_parts
from polestar_jax.analysis.trace import look, record_trace
from polestar_jax.cli import main
from polestar_jax.commands.figures import _read_front

PROMPT = [3, 7, 1, 22, 5]
GEN_LENGTH, BLOCK_LENGTH = 16, 4


def trace_of(family: str, method):
    model = FAMILIES[family]
    return record_trace(model, lively_params(model, 1), method, PROMPT, GEN_LENGTH)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(family):
    return trace_of(family, methods.parallel(threshold=2.0, block_length=BLOCK_LENGTH))


@pytest.fixture(scope="module")
def cached(family):
    return trace_of(family, methods.fast_dllm(threshold=2.0, block_length=BLOCK_LENGTH))


def test_a_trace_tells_the_decode(family, alone):
    assert alone.committed.sum(axis=1).tolist() == [1] * GEN_LENGTH
    assert alone.tokens[0, : len(PROMPT)].tolist() == PROMPT
    assert not alone.masked[-1].any()
    assert alone.kind == ["full"] * GEN_LENGTH
    assert np.flatnonzero(alone.entering).tolist() == [0, 4, 8, 12]
    assert np.unique(alone.start).tolist() == [5, 9, 13, 17]
    model = FAMILIES[family]
    logits = np.asarray(model(lively_params(model, 1), jnp.asarray(alone.tokens[3])[None])[0], np.float64)
    shifted = logits[: logits.shape[0] - model.shift]
    expected = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    np.testing.assert_allclose(alone.log_probability[3, model.shift :], expected, atol=1e-4)


def test_drift_is_equation_4(family, alone):
    model = FAMILIES[family]
    params = lively_params(model, 1)
    now, before = (np.asarray(look(model, params, jnp.asarray(alone.tokens[t])).attention, np.float64) for t in (6, 5))
    divergence = (np.exp(now) * (now - before)).sum(-1).mean(1)
    np.testing.assert_allclose(alone.drift[6], divergence, atol=1e-5)
    entry = np.asarray(look(model, params, jnp.asarray(alone.tokens[4])).attention, np.float64)
    np.testing.assert_allclose(alone.drift_since_entry[6], (np.exp(now) * (now - entry)).sum(-1).mean(1), atol=1e-5)
    assert np.isnan(alone.drift[0]).all()
    assert (alone.drift_since_entry[alone.entering] == 0).all()
    p, q = np.exp(now).mean(1), np.exp(entry).mean(1)
    for layer in range(model.config.layers):
        for place in (0, 9, 20):
            attended = q[layer, place].argmax()
            a, b = p[layer, attended], q[layer, attended]
            change = 1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            np.testing.assert_allclose(alone.anchor_change[6, layer, place], change, atol=1e-5)


def test_staleness_is_that_of_section_c2(family, cached):
    """What is cached outside the block was computed at the block's entry, from the canvas then."""
    model = FAMILIES[family]
    params = lively_params(model, 1)
    step, entry = 7, 4
    now, then = (look(model, params, jnp.asarray(cached.tokens[t])) for t in (step, entry))
    place = np.arange(cached.tokens.shape[1])
    outside = (place < cached.start[step] - model.shift) | (place >= cached.start[step] + BLOCK_LENGTH)
    cosine = lambda a, b: (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    wide = lambda plane: np.asarray(plane, np.float64)
    both = [cosine(wide(now[part]), wide(then[part])).mean(1) for part in (1, 2)]
    np.testing.assert_allclose(cached.staleness[step][:, outside], (1 - sum(both) / 2)[:, outside], atol=1e-5)
    assert np.isnan(cached.staleness[cached.entering]).all()
    assert np.nanmax(cached.staleness) > 1e-3
    assert np.isnan(cached.staleness[1]).sum() == 0


def test_progress_ends_in_the_final_state(alone):
    for position in range(len(PROMPT), len(PROMPT) + GEN_LENGTH):
        last = int(np.flatnonzero(alone.committed[:, position])[-1])
        gain = drift_study.progress(alone, position)
        assert np.isnan(gain[0]) and np.isnan(gain[last + 1 :]).all()
        states = alone.log_probability[:, position] - alone.log_probability[:, position].mean(-1, keepdims=True)
        first = states[0] @ states[last] / np.linalg.norm(states[0]) / np.linalg.norm(states[last])
        np.testing.assert_allclose(np.nansum(gain), 1 - first, atol=1e-4)


def test_shares_of_the_error(cached):
    shares = drift_study.cumulative_error(cached)
    np.testing.assert_allclose(shares[-1].sum(), 1, atol=1e-5)
    assert (np.diff(shares, axis=0) >= 0).all()
    assert shares[-1, 0] >= shares[-1, 1] * 0.5  # a quarter against the next one, by drift


def test_selection_accuracy_knows_the_truth_and_chance(cached):
    n = cached.tokens.shape[1]
    truth = cached._replace(drift_since_entry=cached.staleness, anchor_change=-cached.staleness)
    found = drift_study.selection_accuracy([truth])
    assert found["KL drift"] == 1
    assert found["most attended, cosine"] < 0.3
    chance = [drift_study.selection_accuracy([cached], seed=seed)["random"] for seed in range(20)]
    assert abs(np.mean(chance) - 0.25) < 0.08
    inside = drift_study.window_of(cached, 6, 2, 1)
    assert np.flatnonzero(inside).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 13, 14, 15, 16]
    assert inside.size == n


def test_triggers_by_hand(alone):
    position = len(PROMPT) + 6
    drift, probability = np.zeros_like(alone.drift), np.full_like(alone.log_probability, -30.0)
    drift[4, -1, position - alone.shift] = 3.0
    probability[:, position, 0] = np.log(0.5)
    probability[5:, position, 0] = np.log(0.95)
    made = alone._replace(drift=drift, log_probability=probability)
    assert drift_study.first_trigger(made, position) == 4  # 3 >= 10 (0.9 - 0.5)^2
    assert drift_study.first_trigger(made, position, alpha=20.0) != 4
    assert drift_study.first_confident(made, position) == 5
    assert drift_study.first_confident(made, position, tau=0.99) is None


def test_principal_components_keep_distances():
    random = np.random.default_rng(0)
    plane = random.normal(size=(9, 2)) @ random.normal(size=(2, 7)) + 3
    points = drift_study.principal_components(plane)
    distances = lambda x: np.linalg.norm(x[:, None] - x[None], axis=-1)
    np.testing.assert_allclose(distances(points), distances(plane), atol=1e-9)


def test_drift_is_grouped_by_the_commits_before(alone):
    assert list(drift_study.drift_by_commits([alone])) == ["1"]
    many = alone._replace(masked=np.tile(alone.masked[:1], (len(alone.masked), 1)))
    assert list(drift_study.drift_by_commits([many])) == ["0"]


def test_state_bytes_are_those_of_the_state():
    model = FAMILIES["llada"]
    parts = state_bytes(model, methods.fast_dllm(block_length=4), 5, 16)
    assert parts["keys and values"] == 2 * model.config.layers * model.config.kv_heads * 21 * 8 * 4
    polestar = state_bytes(model, methods.polestar(block_length=4), 5, 16)
    assert polestar["window: codes, centroids, proxies"] > 0


def test_parts_of_a_forward(family):
    model = FAMILIES[family]
    rows = time_parts(model, lively_params(model, 1), 21, 4, repeats=2)
    assert all(row["ms"] > 0 for row in rows)
    by_forward = {name: [row["part"] for row in rows if row["forward"] == name] for name in ("step", "refresh")}
    assert by_forward["step"] == ["attention", "feed-forward"]
    assert by_forward["refresh"][:2] == by_forward["step"] and "drift of proxies" in by_forward["refresh"]
    bars = figures.draw_timing([{"method": "polestar", "kind": "step", "ms_per_layer": 1.0}], rows).axes[1].patches
    ends = {round(bar.get_y(), 3): bar.get_x() + bar.get_width() for bar in bars}
    total = lambda name: sum(row["ms"] for row in rows if row["forward"] == name)
    assert sorted(ends.values()) == pytest.approx(sorted(map(total, {row["forward"] for row in rows})))


def test_shares_of_many_decodes_by_hand():
    counts = [
        dict.fromkeys(drift_study.POLICIES, 0) | {"KL drift": found, "of": of} for found, of in ((6, 10), (9, 30))
    ]
    share, error = drift_study.share_found(counts)["KL drift"]
    assert share == 15 / 40
    # A ratio's residuals are 6 - 3.75 and 9 - 11.25.
    np.testing.assert_allclose(error, np.sqrt(2 * (2.25**2 + 2.25**2)) / 40)
    assert np.isnan(drift_study.share_found(counts[:1])["KL drift"][1])
    assert drift_study.share_found(counts)["random"] == (0, 0)


def test_the_front_is_what_nothing_beats():
    rows = [
        {"method": name, "accuracy": accuracy, "tpf": tpf, "tps": 10 * tpf}
        for name, accuracy, tpf in (("slow", 0.9, 1), ("polestar", 0.88, 4), ("worse", 0.5, 2), ("tie", 0.88, 3))
    ]
    assert [row["method"] for row in figures.pareto_front(rows)] == ["polestar", "slow"]
    figure = figures.draw_front(rows, "tpf")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["polestar", "slow", "worse", "tie"]
    assert axes.get_ylim()[1] > 90


def test_names_cover_neither_one_another_nor_points():
    figure = Figure(figsize=(5, 4), dpi=100, layout="constrained")
    axes = figure.subplots()
    points = [(f"method {number}", 1 + 0.01 * (number % 3), 2 + 0.01 * number, "black") for number in range(9)]
    axes.plot([0, 3], [0, 4], lw=0)
    place_labels(figure, axes, points, size=8)
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) == len(points)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    centers = axes.transData.transform([point[1:3] for point in points])
    assert not any(box.contains(*center) for box in boxes for center in centers)
    page = axes.get_window_extent()
    assert all(page.contains(*corner) for box in boxes for corner in box.corners())


def test_the_command_draws_every_figure(tmp_path, capsys):
    words = ["figures", "--items", "2", "--out", str(tmp_path / "out"), "--methods", "parallel,parallel:threshold=0.5"]
    assert main(words) == 0, capsys.readouterr().err
    drawn = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert drawn == set(figures.FIGURES)
    record = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert set(record["selection_accuracy"]) == set(drift_study.POLICIES)
    assert {row["kind"] for row in record["timing"]} >= {"step", "entry", "full entry"}
    careful, hasty = record["front"]
    assert careful["tpf"] < hasty["tpf"] and careful["tps"] > 0


def test_bad_words_to_figures(tmp_path, capsys):
    (tmp_path / "empty.json").write_text('{"rows": []}')
    (tmp_path / "other.json").write_text('{"rows": [{"method": "polestar"}]}')
    for words, message in (
        (["--items", "0"], "--items 0"),
        (["--methods", "nonesuch"], "unknown method 'nonesuch'"),
        (["--front", str(tmp_path / "missing.json")], "there is no such file"),
        (["--front", str(tmp_path / "empty.json")], "no rows with method, accuracy, tpf and tps"),
        (["--front", str(tmp_path / "other.json")], "no rows with method, accuracy, tpf and tps"),
        (["--front", __file__], "was not written by"),
    ):
        assert main(["figures", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_front_can_come_from_the_demo(tmp_path):
    rows = [{"method": "vanilla", "accuracy": 0.9, "tpf": 1, "tps": 10}]
    (tmp_path / "demo.json").write_text(json.dumps({"rows": rows}))
    assert _read_front(str(tmp_path / "demo.json")) == rows
