"""EntropyCache's rows and its trigger, on hand-made canvases and entropies; its row count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods_table import FAMILIES, lively_params, pad, prompts_of

from polestar_jax import make_decode, methods
from polestar_jax.methods.entropy_cache import EntropyCache
from polestar_jax.types import Canvas, Commits, Prediction, Scope, Spec

PROMPT, GEN, SIZE = 3, 12, 4


def scene(family: str, masked: list[int], start: int):
    """Spec, canvas and scope of one row whose masks are at the given slots."""
    spec = Spec(FAMILIES[family], 1, PROMPT, GEN, SIZE, frozenset({"entropy"}))
    plane = jnp.zeros((1, PROMPT + GEN), bool).at[0, jnp.array(masked)].set(True)
    everywhere, slots = jnp.ones_like(plane), jnp.arange(PROMPT + GEN, dtype=jnp.int32)[None]
    canvas = Canvas(tokens=slots, masked=plane, valid=everywhere, position=slots)
    one = jnp.array([0])
    keys = jax.random.split(jax.random.key(0), 1)
    scope = Scope(one, one + start, one + start + SIZE, plane, everywhere, one < 0, one, keys)
    return spec, canvas, scope


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        # Masks 5, 6 of the block, 7, 9 of the next; slots 4, 8, 3 were committed in forwards 1, 2, 2.
        ("llada", {"recent": 2, "ahead": 1}, [3, 5, 6, 7, 8, 9]),
        ("llada", {"recent": 1, "ahead": 0}, [3, 5, 6]),
        ("llada", {"recent": 9, "ahead": 2}, [3, 4, 5, 6, 7, 8, 9, 12]),
        ("llada", {"recent": 0, "ahead": 0}, [5, 6]),
        # The rows before masks predict them.
        ("dream", {"recent": 1, "ahead": 0}, [3, 4, 5, 6]),
        ("dream", {"recent": 0, "ahead": 2}, [4, 5, 6, 7, 8, 9, 11, 12]),
    ],
)
def test_rows(family, fields, expected):
    spec, canvas, scope = scene(family, [5, 6, 7, 9, 12], PROMPT)
    policy = EntropyCache(0.5, **fields)
    at = jnp.zeros((1, PROMPT + GEN), jnp.int32).at[0, jnp.array([4, 8, 3, 7])].set(jnp.array([1, 2, 2, 3]))
    cache = dataclasses.replace(policy.init(spec), committed_at=at)  # 7 was taken back since
    assert np.flatnonzero(policy.wanted(spec, cache, canvas, scope)[0]).tolist() == expected


@pytest.mark.parametrize(
    ("committed", "max_entropy", "unsure"),
    [
        ([5], 0.3, False),
        ([6], 0.3, True),
        ([5, 6], 0.3, True),
        ([5, 6], 0.4, False),  # at the threshold is not above it
        ([], 0.0, False),
        ([7], 0.0, False),  # its prediction is not valid: nobody measured it
        ([], -np.inf, True),
    ],
)
def test_trigger(committed, max_entropy, unsure):
    spec, canvas, scope = scene("llada", [5, 6, 7], PROMPT)
    policy = EntropyCache(jnp.float32(max_entropy))
    prediction = Prediction(
        slot=jnp.array([[5, 6, 7, 8]]),
        valid=jnp.array([[True, True, False, True]]),
        token=jnp.zeros((1, 4), jnp.int32),
        confidence=jnp.zeros((1, 4)),
        extra={"entropy": jnp.array([[0.1, 0.4, 9.0, 9.0]], jnp.float32)},
    )
    nothing = jnp.zeros(canvas.masked.shape, bool)
    write = nothing.at[0, jnp.array(committed, jnp.int32)].set(True)
    commits = Commits(write, canvas.tokens, nothing.astype(jnp.uint8), nothing.at[0, 8].set(True), nothing[:, 0])
    cache = dataclasses.replace(
        policy.init(spec), forwards=jnp.array([6]), committed_at=jnp.zeros_like(canvas.tokens).at[0, 8].set(2)
    )
    after = policy.observe(spec, cache, scope, prediction, commits)
    assert bool(after.unsure[0]) == unsure
    assert np.flatnonzero(after.committed_at[0]).tolist() == committed
    assert all(after.committed_at[0, slot] == 7 for slot in committed)


@pytest.mark.parametrize(
    ("family", "prompt", "gen", "size"), [("llada", 5, 12, 4), ("dream", 3, 12, 4), ("llada", 9, 6, 2)]
)
def test_rows_follow_the_formula(family, prompt, gen, size):
    model, recent = FAMILIES[family], 3
    method = methods.entropy_cache(block_length=size, threshold=0.6, max_entropy=1.0, recent=recent)
    decode = make_decode(model, method, gen_length=gen)
    state = decode.init(jax.random.split(jax.random.key(0), 1), prompt)
    output, _ = decode(lively_params(model, 1), state, pad(prompts_of(model.config, (prompt,), 0), prompt))
    log = jax.tree.map(lambda leaf: np.asarray(leaf)[0], output.log)
    masked, kinds = np.ones(gen, bool), set()
    for forward in range(int(output.forwards[0])):
        kinds.add(int(log.kind[forward]))
        start = int(np.argmax(masked)) // size * size
        masks = int(masked[start : start + 2 * size].sum())
        known = gen - int(masked.sum())
        if log.kind[forward]:
            assert log.rows[forward] == prompt + gen
        elif not model.shift:
            assert log.rows[forward] == masks + min(recent, known)
        else:  # the rows that predict masks are masks, new tokens, or one more each
            assert masks <= log.rows[forward] <= 2 * masks + min(recent, known)
        masked &= log.token[forward] < 0
    assert kinds == {0, 1}


def test_bad_fields_are_refused():
    with pytest.raises(ValueError, match="recent=-1 must be at least 0"):
        make_decode(FAMILIES["llada"], methods.entropy_cache(recent=-1), gen_length=32)
