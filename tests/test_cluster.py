"""k-means of the window against a NumPy transcription, against the recorded release, and its own contracts."""

import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import kmeans as oracle

from convert import load_hf
from polestar_jax.cluster import Draws, move_centroids, region_clusters, sample_draws, spherical_kmeans

W, D, K, T = 12, 4, 4, 5
paper = jax.jit(lambda rows, region: spherical_kmeans(rows, region, K, T))
release = functools.partial(spherical_kmeans, suffixless_keeps_all=False)
EPSILON = 0.25  # the release's is too small to be seen here
released = jax.jit(lambda rows, region, draws: release(rows, region, K, T, epsilon=EPSILON, draws=draws))

# Small integers: equal rows, opposite rows, multiples of each other and zero rows are all common.
windows = hnp.arrays(np.float32, (W, D), elements=st.integers(-2, 2))
regions = hnp.arrays(np.int32, (W,), elements=st.integers(-1, 1))
draws = st.builds(
    Draws,
    hnp.arrays(np.int32, (2, K), elements=st.integers(-1, W - 1)),
    hnp.arrays(np.int32, (2, T, K), elements=st.integers(-1, W - 1)),
)
reproducible = settings(derandomize=True, deadline=None, max_examples=100)


def bounded(draws: Draws, region: np.ndarray) -> Draws:
    """Draws folded into the rows that the regions have."""
    size = np.maximum([np.sum(region == 0), np.sum(region == 1)], 1)
    fold = lambda ranks, size: np.where(ranks < 0, -1, ranks % size).astype(np.int32)
    return Draws(fold(draws.start, size[:, None]), fold(draws.redraw, size[:, None, None]))


def assert_equals_oracle(clusters, expected):
    labels, centroids, counts = expected
    np.testing.assert_array_equal(clusters.labels, labels)
    np.testing.assert_array_equal(clusters.counts, counts)
    np.testing.assert_allclose(clusters.centroids, centroids, atol=1e-6)


@given(windows, regions)
@reproducible
def test_paper_preset_equals_oracle(rows, region):
    assert_equals_oracle(paper(rows, region), oracle.kmeans(rows, region, K, T))


@given(windows, regions, draws)
@reproducible
def test_release_preset_equals_oracle(rows, region, draws):
    draws = bounded(draws, region)
    expected = oracle.kmeans(rows, region, K, T, draws.start, draws.redraw, release=True, epsilon=EPSILON)
    assert_equals_oracle(released(rows, region, draws), expected)


@given(windows, regions)
@reproducible
def test_clusters_partition_the_window(rows, region):
    clusters = paper(rows, region)
    labels, counts = np.asarray(clusters.labels), np.asarray(clusters.counts)
    share, _ = oracle.shares(np.sum(region == 0), np.sum(region == 1), K)
    assert counts.sum() == np.sum(region >= 0)
    assert np.array_equal(labels >= 0, region >= 0)
    assert np.all(labels[region == 0] < share) and np.all(labels[region == 1] >= share)
    for i in np.flatnonzero(counts):
        np.testing.assert_allclose(clusters.centroids[i], rows[labels == i].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("prefix, suffix", [(0, 0), (0, 9), (9, 0), (1, 9), (9, 1), (2, 1), (4, 8), (5, 7)])
def test_region_sizes(prefix, suffix):
    rng = np.random.default_rng(0)
    region = rng.permutation(np.repeat([0, 1, -1], [prefix, suffix, W - prefix - suffix])).astype(np.int32)
    rows = rng.normal(size=(W, D)).astype(np.float32)
    assert_equals_oracle(paper(rows, region), oracle.kmeans(rows, region, K, T))


def test_rows_outside_have_no_influence():
    rng = np.random.default_rng(1)
    rows, region = rng.normal(size=(W, D)).astype(np.float32), np.repeat([0, -1, 1], 4).astype(np.int32)
    poisoned = np.where((region < 0)[:, None], np.nan, rows)
    assert_same(paper(poisoned, region), paper(rows, region))


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_rows_of_one_direction_share_the_lowest_cluster():
    """As at layer 0, where the whole suffix is [MASK] embeddings: rounding of equal cosines must not split them."""
    rng = np.random.default_rng(2)
    suffix = rng.normal(size=(20, 1, 200)) * rng.uniform(0.5, 2, (20, 13, 1))
    rows = np.concatenate([rng.normal(size=(20, 20, 200)), suffix], axis=1).astype(np.float32)
    region = jnp.asarray(np.repeat([0, 1], [20, 13]), jnp.int32)
    clusters = jax.jit(jax.vmap(lambda rows: spherical_kmeans(rows, region, 8, T)))(rows)
    share, _ = oracle.shares(20, 13, 8)
    assert np.all(np.asarray(clusters.labels)[:, 20:] == share)
    np.testing.assert_array_equal(clusters.counts[:, share:], [[13, 0, 0, 0]] * 20)


def test_no_more_rows_than_clusters():
    rows = np.ones((W, D), np.float32)
    region = np.full(W, -1, np.int32)
    region[[2, 5, 7]] = 0
    clusters = paper(rows, region)
    np.testing.assert_array_equal(clusters.labels[region == 0], [0, 1, 2])
    np.testing.assert_array_equal(clusters.counts, [1, 1, 1, 0])


def test_batch_rows_are_independent_and_low_precision_is_widened():
    rng = np.random.default_rng(3)
    rows = jnp.asarray(rng.normal(size=(3, W, D)), jnp.bfloat16)
    region = jnp.asarray(rng.integers(-1, 2, (3, W)), jnp.int32)
    batched = jax.jit(jax.vmap(lambda r, g: spherical_kmeans(r, g, K, T)))(rows, region)
    assert batched.centroids.dtype == jnp.float32
    for b in range(3):
        alone = paper(rows[b].astype(jnp.float32), region[b])
        np.testing.assert_array_equal(batched.labels[b], alone.labels)
        np.testing.assert_allclose(batched.centroids[b], alone.centroids, rtol=1e-6, atol=1e-6)


def test_region_clusters():
    for preset, clusters in itertools.product((True, False), (2, 3, 8)):
        sizes = np.array([*itertools.product(range(7), range(7)), (64, 32), (64, 0), (17, 32)], np.int32)
        split = functools.partial(region_clusters, clusters=clusters, suffixless_keeps_all=preset)
        found = np.stack(jax.vmap(split)(*jnp.asarray(sizes).T), axis=1)
        expected = [oracle.shares(*pair, clusters, release=not preset) for pair in sizes.tolist()]
        np.testing.assert_array_equal(found, expected)


def test_sampled_draws():
    sizes = [7, 3, 2]
    region = jnp.asarray(np.repeat([0, 1, -1], sizes), jnp.int32)
    sample = jax.jit(jax.vmap(lambda key, region: sample_draws(key, region, K, T), in_axes=(0, None)))
    keys = jax.random.split(jax.random.key(0), 1000)
    drawn = sample(keys, region)
    start, redraw = np.asarray(drawn.start), np.asarray(drawn.redraw)
    assert start.shape == (1000, 2, K) and redraw.shape == (1000, 2, T, K)
    assert all(len(set(ranks)) == K for ranks in start[:, 0])
    assert np.all(start[:, 1, 3] == -1) and np.all(np.sort(start[:, 1, :3], axis=-1) == np.arange(3))
    for ranks, size in [(start[:, 0], 7), (start[:, 1, :3], 3), (redraw[:, 0], 7), (redraw[:, 1], 3)]:
        share = np.bincount(ranks.ravel(), minlength=size) / ranks.size
        assert len(share) == size
        np.testing.assert_allclose(share, 1 / size, atol=0.02)
    assert_same(sample(keys, region[::-1]), drawn)
    assert_same(sample(keys, jnp.pad(region, (5, 4), constant_values=-1)), drawn)


@given(windows, windows, regions, hnp.arrays(bool, (W,)))
@reproducible
def test_moved_centroids_stay_means(old, new, region, changed):
    clusters = paper(old, region)
    labels, counts = np.asarray(clusters.labels), np.asarray(clusters.counts)
    unread = np.where(changed[:, None], new, np.nan)
    moved = move(clusters.centroids, counts, labels, old, unread, changed)
    rows = np.where(changed[:, None], new, old)
    for i in range(K):
        expected = rows[labels == i].mean(axis=0) if counts[i] else clusters.centroids[i]
        np.testing.assert_allclose(moved[i], expected, atol=1e-5)


def test_epsilon_damps_moved_centroids():
    centroids, rows = jnp.zeros((K, D)), jnp.ones((W, D))
    counts, labels = jnp.asarray([1, 0, 3, 0]), jnp.asarray([0, 2, 2, 2] + [-1] * (W - 4))
    moved = move(centroids, counts, labels, jnp.zeros((W, D)), rows, jnp.arange(W) < 2, epsilon=EPSILON)
    np.testing.assert_allclose(moved[:, 0], [1 / 1.25, 0, 1 / 3.25, 0], rtol=1e-6)


move = jax.jit(move_centroids, static_argnames="epsilon")


@pytest.mark.parametrize("clusters, iterations, named", [(1, T, "clusters=1"), (K, 0, "iterations=0")])
def test_refused(clusters, iterations, named):
    with pytest.raises(ValueError, match=named):
        spherical_kmeans(jnp.ones((W, D)), jnp.zeros(W, jnp.int32), clusters, iterations)


# Recorded runs of the release: every layer of full entries, layer 0 of window entries (deeper ones need their cache).
SLOTS, SHARE = 64, 8


@functools.partial(jax.jit, static_argnums=0)
def layer_inputs(model, params, tokens):
    """Hidden states `[E, L, N, D]` of whole sequences `[E, N]`."""
    positions = jnp.arange(tokens.shape[1])[None, :]
    hidden = [model.embed(params, tokens)]
    for layer in range(model.config.layers - 1):
        query, key, value = model.project(params, layer, hidden[-1])
        query, key = model.rotate(query, positions), model.rotate(key, positions)
        hidden.append(model.finish(params, layer, hidden[-1], jax.nn.dot_product_attention(query, key, value)))
    return jnp.stack(hidden, axis=1)


class Recorded:
    """One case of `golden/`: its checkpoint, trace, and the layer inputs at every entry."""

    def __init__(self, folder: Path):
        self.trace = dict(np.load(folder / "trace.npz"))
        self.case = json.loads((folder / "case.json").read_text())
        self.full = self.trace["step_kind"][self.trace["entry_step"]] == 0
        model, params = load_hf(folder)
        tokens = self.trace["x_before"][self.trace["entry_step"]].astype(np.int32)
        self.hidden = np.asarray(layer_inputs(model, params, tokens))

    def window(self, entry: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of an entry's window and their regions, padded to one length with the block among the outsiders."""
        low, high = self.trace["entry_window"][entry].tolist()
        size = self.case["block_length"]
        start = len(self.case["prompt"]) + size * int(self.trace["step_block"][self.trace["entry_step"][entry]])
        slots = np.arange(low, low + SLOTS)
        region = np.where(slots < start, 0, np.where((slots >= start + size) & (slots < high), 1, -1))
        return np.minimum(slots, self.hidden.shape[2] - 1), region.astype(np.int32)

    def problems(self):
        for entry, layer in itertools.product(range(len(self.full)), range(self.hidden.shape[1])):
            if layer == 0 or self.full[entry]:
                yield entry, layer


@pytest.fixture(scope="module")
def recorded(golden: Path) -> dict[str, Recorded]:
    return {name: Recorded(golden / f"polestar_{name}") for name in "abc"}


@pytest.fixture(scope="module")
def replayed(recorded):
    """Every recorded clustering with its draws injected, in one compilation."""
    where = [(name, *problem) for name, case in recorded.items() for problem in case.problems()]
    rows, region, start, redraw = [], [], [], []
    for name, entry, layer in where:
        case = recorded[name]
        slots, sides = case.window(entry)
        rows.append(case.hidden[entry, layer, slots])
        region.append(sides)
        start.append(case.trace["km_init"][entry, layer])
        redraw.append(case.trace["km_redraw"][entry, layer])
    draws = Draws(np.array(start, np.int32), np.array(redraw, np.int32))
    run = jax.jit(jax.vmap(lambda rows, region, draws: release(rows, region, SHARE, T, epsilon=1e-6, draws=draws)))
    clusters = jax.tree.map(np.asarray, run(np.array(rows), np.array(region), draws))
    return {key: jax.tree.map(lambda x, i=i: x[i], clusters) for i, key in enumerate(where)}


def test_recorded_clusters_are_reproduced(recorded, replayed):
    """Region by region, wherever no duplicate centroids competed: the release leaves those ties to torch."""
    compared = 0
    for (name, entry, layer), clusters in replayed.items():
        trace = recorded[name].trace
        slots, region = recorded[name].window(entry)
        split = trace["entry_nclusters"][entry]
        for side, own in enumerate((slice(0, split[0]), slice(split[0], split.sum()))):
            if trace["km_ties"][entry, layer, side] == 0:
                inside = region == side
                np.testing.assert_array_equal(clusters.labels[inside], trace["labels"][entry, layer, slots[inside]])
                np.testing.assert_array_equal(clusters.counts[own], trace["counts"][entry, layer, own])
                np.testing.assert_allclose(clusters.centroids[own], trace["centroids"][entry, layer, own], atol=3e-4)
                compared += inside.any()
        assert np.all(clusters.labels[region < 0] == -1)
        assert not np.any(clusters.counts[split.sum() :])
    assert compared > 40


@pytest.mark.parametrize("name", ["a", "c"])
def test_recorded_ties_fall_to_the_lowest_cluster(recorded, replayed, name):
    """Case b alone has a tie that torch settled otherwise."""
    for (case, entry, layer), clusters in replayed.items():
        if case == name:
            slots, region = recorded[name].window(entry)
            inside = region >= 0
            expected = recorded[name].trace["labels"][entry, layer, slots[inside]]
            np.testing.assert_array_equal(clusters.labels[inside], expected)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_recorded_centroids_move(recorded, name):
    """The first refresh after the first entry: layer l's centroids move by the packet of layer l - 1."""
    case = recorded[name]
    trace = case.trace
    assert case.full[0] and trace["refresh_step"][0] < trace["entry_step"][1]
    for layer in range(1, case.hidden.shape[1]):
        chosen = trace["sel"][0, layer - 1]
        old = case.hidden[0, layer]
        new = old.copy()
        new[chosen] = trace[f"packet0_layer{layer - 1}"]
        labels, counts = trace["labels"][0, layer].astype(np.int32), trace["counts"][0, layer].astype(np.int32)
        moved = move(trace["centroids"][0, layer], counts, labels, old, new, chosen, epsilon=1e-6)
        np.testing.assert_allclose(moved, trace[f"centroids_after0_layer{layer}"], atol=3e-4)
