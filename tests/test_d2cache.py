"""d2Cache's choice of rows: density, rollout, nucleus, gaps and cap against plain NumPy, and its row count."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods_table import FAMILIES, lively_params, pad, prompts_of

from polestar_jax import make_decode, methods
from polestar_jax.certainty import certainty_density
from polestar_jax.chosen_rows import Chosen, D2Cache
from polestar_jax.rollout import fill_gaps, nucleus, rollout_importance
from polestar_jax.types import NO_FORWARD, Commits, Prediction, Scope, Spec


def density_by_hand(decoded, sigma):
    length = len(decoded)
    flag = lambda j: 1.0 if j < 0 else float(decoded[min(j, length - 1)])
    kernel = lambda d: np.exp(-(d**2) / (2 * sigma**2))
    total = sum(kernel(d) for d in range(-3 * length, 3 * length))
    return np.array([sum(flag(j) * kernel(i - j) for j in range(-length, 2 * length)) / total for i in range(length)])


@pytest.mark.parametrize("sigma", [0.7, 10.0])
def test_density(sigma):
    decoded = np.random.default_rng(0).random((5, 12)) < 0.5
    decoded[0], decoded[1] = True, False
    found = certainty_density(jnp.asarray(decoded), sigma)
    np.testing.assert_allclose(found, [density_by_hand(row, sigma) for row in decoded], atol=1e-6)
    assert found[1, 0] > found[1, 1]  # next to the prompt one is surer
    if sigma < 1:  # the kernel ends inside what is counted
        np.testing.assert_allclose(found[0], 1, atol=1e-6)


def test_rollout_is_the_product_of_matrices():
    random, batch, length, slot = np.random.default_rng(1), 2, 7, np.array([[1, 4, 6, 7], [2, 3, 5, 0]])
    valid = np.array([[True, True, True, False], [True, True, False, True]])
    attention = random.random((3, batch, 4, length)).astype(np.float32)
    attention /= attention.sum(-1, keepdims=True)
    counted = np.array([[True] * 7, [False] + [True] * 6])
    found = rollout_importance(
        list(jnp.asarray(attention)), jnp.asarray(slot), jnp.asarray(valid), jnp.asarray(counted)
    )
    for row in range(batch):
        product = np.eye(length)
        for layer in attention[:, row]:
            matrix = np.eye(length)
            for i in np.flatnonzero(valid[row]):
                matrix[slot[row, i]] = (layer[i] + matrix[slot[row, i]]) / 2
            product = matrix @ product
        np.testing.assert_allclose(found[row], product[counted[row]].sum(0), atol=1e-5)


def test_nucleus():
    importance = jnp.array([[4.0, 1.0, 3.0, 9.0, 2.0, 0.0]])
    eligible = jnp.array([[True, True, True, False, True, True]])
    pick = lambda share, eligible=eligible: np.flatnonzero(nucleus(importance, eligible, share)[0]).tolist()
    assert pick(0.0) == pick(0.3) == [0]  # the first alone has 0.4, and one is always taken
    assert pick(0.71) == [0, 2]
    assert pick(0.69) == [0]
    assert pick(1.0) == [0, 1, 2, 4, 5]
    assert pick(0.5, jnp.zeros_like(eligible)) == []


def test_gaps():
    plane = jnp.array([[0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0]], bool)
    fill = lambda width: np.flatnonzero(fill_gaps(plane, width)[0]).tolist()
    assert fill(0) == fill(1) == [1, 3, 6, 10]
    assert fill(2) == [1, 2, 3, 6, 10]
    assert fill(3) == [1, 2, 3, 4, 5, 6, 10]
    assert fill(4) == list(range(1, 11))


def scene(model, policy: D2Cache, seed: int):
    """A state in the middle of a decode: spec, cache, scope, prediction, commits; one row, 3 pads."""
    random, prompt, gen, size = np.random.default_rng(seed), 6, 12, 4
    spec = Spec(model, 1, prompt, gen, size, frozenset())
    block = int(random.integers(0, 3))
    masked = np.zeros((1, prompt + gen), bool)
    masked[0, prompt + block * size :] = random.random(gen - block * size) < 0.8
    masked[0, prompt + block * size + int(random.integers(0, size))] = True
    scope = Scope(
        index=jnp.array([block]),
        start=jnp.array([prompt + block * size]),
        stop=jnp.array([prompt + block * size + size]),
        candidates=jnp.asarray(masked),
        visible=jnp.arange(prompt + gen)[None] >= 3,
        entering=jnp.array([False]),
        phase=jnp.array([1]),
        keys=jax.random.split(jax.random.key(0), 1),
    )
    shown = np.sort(random.permutation(np.arange(prompt, prompt + gen))[:6])[None]
    write = masked & (random.random(masked.shape) < 0.4)
    cache = dataclasses.replace(
        policy.init(spec),
        started=jnp.array([True]),
        confidence=jnp.asarray(random.random((1, gen)), jnp.float32),
        importance=jnp.asarray(random.random(masked.shape) * (np.arange(prompt + gen) >= 3), jnp.float32),
        masked=jnp.asarray(masked),
        stale=jnp.asarray((np.arange(prompt + gen) == prompt)[None] & ~masked),
    )
    confidence = jnp.asarray(random.random((1, 6)), jnp.float32)
    prediction = Prediction(jnp.asarray(shown), jnp.ones((1, 6), bool), jnp.zeros((1, 6), jnp.int32), confidence, {})
    nothing = jnp.zeros(masked.shape, bool)
    commits = Commits(
        jnp.asarray(write),
        jnp.zeros(masked.shape, jnp.int32),
        jnp.zeros(masked.shape, jnp.uint8),
        nothing,
        nothing[:, 0],
    )
    return spec, cache, scope, prediction, commits


def choice_by_hand(policy: D2Cache, spec, cache: Chosen, scope, prediction, commits) -> list[int]:
    """The next row set, a row at a time."""
    prompt, gen, shift = spec.prompt_length, spec.gen_length, spec.model.shift
    confidence = np.array(cache.confidence[0])
    confidence[np.asarray(prediction.slot[0]) - prompt] = prediction.confidence[0]
    write = np.asarray(commits.write[0])
    masks = [i for i in range(gen) if cache.masked[0, prompt + i] and not write[prompt + i]]
    density = density_by_hand([i not in masks for i in range(gen)], policy.sigma)
    first, stop = int(scope.start[0]) - prompt, int(scope.stop[0]) - prompt
    size, k = stop - first, int(policy.current_k)
    farthest = masks[k - 1] if len(masks) >= k else gen - 1
    searched = [i for i in masks if first <= i < (farthest // size + 1) * size]
    score = confidence * density
    in_order = sorted(searched, key=lambda i: (not first <= i < stop, -score[i]))
    predicting = {prompt + i - shift for i in in_order[:k]}
    stale = set(np.flatnonzero(np.asarray(cache.stale[0]) | write)) - predicting
    importance = np.array(cache.importance[0], np.float64)
    others = [i for i in np.flatnonzero(scope.visible[0]) if i not in predicting | stale]
    others.sort(key=lambda i: -importance[i])
    total, together, important = sum(importance[i] for i in others), 0.0, []
    for i in others:
        together += importance[i] / total
        if important and together > policy.rollout_p:
            break
        important.append(i)
        if together > policy.rollout_p:
            break
    chosen = sorted(predicting | stale | set(important))
    gaps = [(a, b) for a, b in itertools.pairwise(chosen) if b - a <= policy.inflate_w]
    between = [i for a, b in gaps for i in range(a + 1, b)]
    ranked = sorted(predicting) + sorted(stale) + important + between
    return sorted(ranked[: policy.capacity])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policy",
    [
        D2Cache(current_k=3, rollout_p=0.3, sigma=10.0, inflate_w=2, capacity=18),
        D2Cache(current_k=5, rollout_p=0.5, sigma=2.0, inflate_w=3, capacity=8),
        D2Cache(current_k=9, rollout_p=0.0, sigma=1.0, inflate_w=0, capacity=11),
    ],
    ids=["gaps", "too_many", "many_masks"],
)
def test_choice_equals_the_one_by_hand(family, policy):
    full = 0
    observe = jax.jit(D2Cache.observe, static_argnums=1)
    for seed in range(40):
        spec, cache, *rest = scene(FAMILIES[family], policy, seed)
        found = np.flatnonzero(observe(policy, spec, cache, *rest).wanted[0]).tolist()
        assert found == choice_by_hand(policy, spec, cache, *rest), seed
        full += len(found) == policy.capacity
    assert full > 10 or policy.capacity != 8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("prompt", "gen", "size"), [(5, 12, 4), (3, 8, 8), (9, 6, 2)])
def test_rows_follow_the_formula(family, prompt, gen, size):
    """With a nucleus of one row and no gaps: min(current_k, masks) + committed last + 1."""
    model, current_k = FAMILIES[family], 3
    method = methods.d2cache(block_length=size, threshold=0.6, current_k=current_k, rollout_p=0, capacity=16)
    decode = make_decode(model, method, gen_length=gen)
    prompts = prompts_of(model.config, (prompt,), 0)
    output, _ = decode(
        lively_params(model, 1), decode.init(jax.random.split(jax.random.key(0), 1), prompt), pad(prompts, prompt)
    )
    log = jax.tree.map(lambda leaf: np.asarray(leaf)[0], output.log)
    masked, committed = np.ones(gen, bool), np.zeros(gen, bool)
    assert log.rows[0] == prompt + gen
    for forward in range(int(output.forwards[0])):
        if forward:
            # The rows that predict masks may be new tokens themselves, where logits are shifted.
            least = min(current_k, masked.sum()) + committed.sum() + 1
            assert (
                log.rows[forward] == least if not model.shift else least - committed.sum() <= log.rows[forward] <= least
            )
        committed = log.token[forward] >= 0
        masked &= ~committed
    assert log.kind[0] == 1 and set(log.kind[1:]) <= {0, NO_FORWARD}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"current_k": 0}, "current_k=0"),
        ({"rollout_p": 1.5}, "rollout_p=1.5"),
        ({"sigma": 0}, "sigma=0"),
        ({"current_k": 32, "capacity": 9}, "capacity=9 must be at least 18"),
        ({"preset": "best"}, "preset='best'"),
        ({"prior": -1.0}, "sigma=-1.0"),
    ],
)
def test_bad_fields_are_refused(fields, word):
    with pytest.raises(ValueError, match=word):
        make_decode(FAMILIES["llada"], methods.d2cache(**fields), gen_length=16)
