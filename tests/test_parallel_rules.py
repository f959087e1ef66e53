"""Rules and schedules of the compared parallel decoders on hand-made predictions, against plain Python (contract 7)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from methods_table import FAMILIES
from oracles import parallel

from polestar_jax import Reason, make_decode, methods
from polestar_jax.commit import Quota, Threshold
from polestar_jax.dropped_suffix import DroppedSuffix
from polestar_jax.early_stop import StopAtEos
from polestar_jax.methods.dimple import Confident
from polestar_jax.methods.hierarchy import Hierarchy
from polestar_jax.methods.localleap import LocalLeap
from polestar_jax.methods.prophet import EarlyExit
from polestar_jax.methods.slowfast import Cycles
from polestar_jax.methods.wino import Wino
from polestar_jax.prompts import new_canvas
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.shadow import shadow_keys
from polestar_jax.types import Prediction, Prompt, Spec

P, G, S, B = 3, 24, 8, 2
START = P + S  # the block in question is the second of three
MODEL = FAMILIES["llada"]
SPEC = Spec(MODEL, batch=B, prompt_length=P, gen_length=G, span=S, needs=frozenset({"gap", "shadow", "entropy"}))
some = settings(derandomize=True, deadline=None, max_examples=60)

eighths = st.integers(0, 8).map(lambda i: np.float32(i / 8))  # exact in float32, which makes ties real ones
confidences = hnp.arrays(np.float32, (B, S), elements=eighths)
planes = hnp.arrays(bool, (B, S))
NOTHING_QUALIFIES, EVERYTHING_QUALIFIES = np.zeros((B, S), np.float32), np.ones((B, S), np.float32)
ALL_MASKED = np.ones((B, S), bool)
ONE_MASKED = np.arange(S)[None] == np.array([[0], [S - 1]])
corners = (
    example(masked=ALL_MASKED, confidence=NOTHING_QUALIFIES),
    example(masked=ALL_MASKED, confidence=EVERYTHING_QUALIFIES),
    example(masked=ONE_MASKED, confidence=NOTHING_QUALIFIES),
    example(masked=ONE_MASKED, confidence=EVERYTHING_QUALIFIES),
    example(masked=~ALL_MASKED, confidence=EVERYTHING_QUALIFIES),
)


def with_corners(test):
    """All ties, nothing and everything qualifying, a block of one masked token, and a full one."""
    return functools.reduce(lambda wrapped, corner: corner(wrapped), corners, test)


def canvas_of(masked, tokens=1):
    """A canvas whose second block has these masks; the third is masked, and so is the last position of the first."""
    prompt = Prompt(jnp.ones((B, P), jnp.int32), jnp.ones((B, P), bool))
    canvas = new_canvas(SPEC, prompt)
    plane = jnp.zeros((B, P + G), bool).at[:, START : START + S].set(masked).at[:, START + S :].set(True)
    plane = plane.at[:, START - 1].set(True)
    return dataclasses.replace(canvas, masked=plane, tokens=jnp.where(plane, canvas.tokens, tokens))


def scope_of(canvas, phase):
    schedule = SemiAutoregressive(block_length=S)
    blocks = dataclasses.replace(schedule.init(SPEC), index=jnp.ones(B, jnp.int32), phase=jnp.asarray(phase, jnp.int32))
    keys = jax.random.split(jax.random.key(0), B)
    # A block that is full would be skipped; here it is looked at all the same.
    scope = schedule.scope(SPEC, dataclasses.replace(blocks, phase=jnp.ones(B, jnp.int32)), canvas, keys)
    return dataclasses.replace(scope, phase=blocks.phase, entering=blocks.phase == 0)


def prediction_of(confidence, extra):
    """Predictions of the block's positions, token = slot, and two rows that must be ignored."""
    slot = jnp.broadcast_to(jnp.arange(START - 1, START + S + 1, dtype=jnp.int32), (B, S + 2))
    wide = lambda values, edge: jnp.pad(jnp.asarray(values), ((0, 0), (1, 1)), constant_values=edge)
    valid = jnp.ones(slot.shape, bool).at[:, -1].set(False)
    extra = {name: wide(values, 0.0) for name, values in extra.items()}
    return Prediction(slot, valid, slot, wide(confidence, 1.0), extra)


@jax.jit
def _committed(rule, state, masked, confidence, extra, phase):
    canvas = canvas_of(masked)
    return rule.commit(SPEC, state, scope_of(canvas, phase), canvas, prediction_of(confidence, extra))


def commits_of(rule, masked, confidence, extra=None, phase=(1, 1), state=None):
    """New rule state; reasons and revocations `[B, S]` of the block."""
    state = rule.init(SPEC) if state is None else state
    rule = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), rule)
    state, commits = _committed(rule, state, masked, confidence, extra or {}, np.array(phase))
    write, tokens, reason = (np.asarray(leaf) for leaf in (commits.write, commits.tokens, commits.reason))
    np.testing.assert_array_equal(write, reason != Reason.NONE)
    np.testing.assert_array_equal(tokens[write], np.nonzero(write)[1])  # the token is the slot
    block = slice(START, START + S)
    outside = np.ones(P + G, bool)
    outside[block] = False
    assert not write[:, outside].any() and not np.asarray(commits.revoke)[:, outside].any()
    assert not commits.stop.any()
    return state, reason[:, block], np.asarray(commits.revoke)[:, block]


def floats(row):
    return [float(value) for value in row]


# Rules without memory.


@pytest.mark.parametrize("remask", [None, 0.375])
@pytest.mark.parametrize("tied", [False, True])
@with_corners
@given(masked=planes, confidence=confidences)
@some
def test_hierarchy(tied, remask, masked, confidence):
    rule = Hierarchy(threshold=0.75, low_threshold=0.25, remask_threshold=remask, tied=tied)
    _, reason, revoked = commits_of(rule, masked, confidence)
    for row in range(B):
        expected = parallel.hierarchy(floats(confidence[row]), masked[row], 0.75, 0.25, remask, tied)
        if masked[row].any():  # the loop never asks about a block without masks
            np.testing.assert_array_equal(reason[row], expected[0])
            np.testing.assert_array_equal(revoked[row], expected[1])
            net = masked[row].sum() - ((masked[row] | revoked[row]) & (reason[row] == 0)).sum()
            assert net >= 1


@pytest.mark.parametrize("radius", [0, 1, 4, 30])
@with_corners
@given(masked=planes, confidence=confidences)
@some
def test_localleap(radius, masked, confidence):
    _, reason, _ = commits_of(LocalLeap(0.75, 0.5, radius), masked, confidence)
    for row in range(B):
        expected = parallel.localleap(floats(confidence[row]), masked[row], 0.75, 0.5, radius)
        np.testing.assert_array_equal(reason[row], expected)


# Rules with memory.


@pytest.mark.parametrize("forwards", [1, 2, 4, 8])
@given(masked=planes, confidence=confidences, drawn=st.lists(confidences, min_size=8, max_size=8))
@some
def test_dimple_over_a_block(forwards, masked, confidence, drawn):
    rule, masked, state = Confident(0.875, steps=forwards * G // S), masked.copy(), None
    at_entry = masked.sum(axis=1)
    for phase in range(forwards):
        confidence = np.minimum(confidence, drawn[phase])
        state, reason, _ = commits_of(rule, masked, confidence, phase=(phase, phase), state=state)
        for row in range(B):
            if masked[row].any():
                c = floats(confidence[row])
                expected = parallel.dimple(c, masked[row], 0.875, int(at_entry[row]), phase, forwards)
                np.testing.assert_array_equal(reason[row], expected)
                assert reason[row].any()
        masked[reason != 0] = False
    assert not masked.any()


@pytest.mark.parametrize(("score", "sign"), [("margin", 1), ("entropy", -1)])
def test_dimple_by_other_scores(score, sign):
    """One per forward, by the score, not the confidence."""
    values = np.tile(np.arange(S, dtype=np.float32) / S + 0.1, (B, 1))
    _, reason, _ = commits_of(Confident(2.0, score=score), ALL_MASKED, values[:, ::-1], {score: values}, phase=(0, 0))
    assert reason.nonzero()[1].tolist() == [S - 1 if sign == 1 else 0] * B


@pytest.mark.parametrize("bound", ["last", "now"])
@given(st.lists(st.tuples(confidences, confidences), min_size=S, max_size=S))
@some
def test_wino_over_a_block(bound, forwards):
    """Also: a block of S ends within S forwards, however much is taken back."""
    rule, masked, state, last = Wino(0.5, 0.75, bound=bound), ALL_MASKED.copy(), None, [30, 30]
    for phase, (confidence, shadow) in enumerate(forwards):
        extra = {"shadow": shadow}
        state, reason, revoked = commits_of(rule, masked, confidence, extra, phase=(phase, phase), state=state)
        for row in range(B):
            if masked[row].any():
                c, s = floats(confidence[row]), floats(shadow[row])
                *expected, last[row] = parallel.wino(c, s, masked[row], 0.5, 0.75, last[row], bound)
                np.testing.assert_array_equal(reason[row], expected[0])
                np.testing.assert_array_equal(revoked[row], expected[1])
                net = (reason[row] != 0).sum() - revoked[row].sum()
                assert not rule.progresses or net >= 1
                masked[row] = (masked[row] & (reason[row] == 0)) | revoked[row]
    assert not masked.any()


def test_wino_caps_what_one_forward_commits():
    """0.7 of the masks, but at least 5 and at most 20; the most confident ones, and none of them is verified yet."""
    confidence = np.tile(np.linspace(0.6, 0.9, S, dtype=np.float32), (B, 1))
    masked = np.stack([np.ones(S, bool), np.arange(S) < 6])
    extra = {"shadow": np.zeros((B, S), np.float32)}
    _, reason, revoked = commits_of(Wino(0.5, 0.9), masked, confidence, extra)
    assert reason.astype(bool).sum(axis=1).tolist() == [5, 5]
    np.testing.assert_array_equal(reason[0] > 0, np.arange(S) >= 3)
    np.testing.assert_array_equal(reason[1] > 0, (np.arange(S) >= 1) & (np.arange(S) < 6))
    assert not revoked[0].any() and not (revoked[1] & masked[1]).any()


def test_shadow_sees_everything_but_what_it_predicts():
    canvas = canvas_of(ALL_MASKED)
    keys = np.asarray(shadow_keys(SPEC, scope_of(canvas, (1, 1))))
    for row in range(S):
        hidden = np.flatnonzero(~keys[0, row])
        assert hidden.tolist() == [START + row]


# Early exit.


def exits(gap, answer_start=None, phase=0, steps=None, **bars):
    """Whether every mask that is predicted is committed at once."""
    rule = EarlyExit(Quota(steps=steps), answer_start=answer_start, answer_length=2, steps=steps, **bars)
    masked = np.arange(S)[None] != np.array([[2], [2]])
    rule = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), rule)
    confidence = np.linspace(0, 1, S, dtype=np.float32)[None].repeat(B, 0)
    canvas = canvas_of(masked)
    scope = scope_of(canvas, (phase, phase))
    prediction = prediction_of(confidence, {"gap": gap})
    _, commits = rule.commit(SPEC, rule.init(SPEC), scope, canvas, prediction)
    written = np.asarray(commits.write[:, START - 1 : START + S])
    everything = np.concatenate([np.ones((B, 1), bool), masked], axis=1)  # the first block's last one too
    return [bool((written[row] == everything[row]).all()) for row in range(B)]


def test_prophet_averages_the_gap_of_the_answer():
    """Positions 10 and 11 of the generation are the third and fourth of the block; the third is committed already."""
    gap = np.zeros((B, S), np.float32)
    gap[0, 2:4], gap[1, 2:4] = (6.0, 4.0), (6.0, 3.9)
    bars = {"early": 100.0, "mid": 5.0, "late": 100.0}
    assert exits(gap, answer_start=10, phase=1, **bars) == [True, False]
    assert exits(gap, answer_start=11, phase=1, **bars) == [False, False]


def test_prophet_lowers_its_bar():
    """The second block begins with forward 9 of 24: 9/24 = 0.375 is mid, 17/24 = 0.71 late; with 12 steps 5/12."""
    gap = np.full((B, S), 3.0, np.float32)
    bars = {"early": 7.0, "mid": 5.0, "late": 2.5}
    assert exits(gap, answer_start=10, phase=0, **bars) == [False, False]
    assert exits(gap, answer_start=10, phase=8, **bars) == [True, True]
    assert exits(gap + 2, answer_start=10, phase=0, **bars) == [True, True]
    assert exits(gap, answer_start=10, phase=3, steps=12, **bars) == [False, False]
    assert exits(gap, answer_start=10, phase=5, steps=12, **bars) == [True, True]


def test_prophet_without_an_answer_looks_at_all_masks():
    """The committed third position of the block and the predictions that are invalid do not count."""
    gap = np.full((B, S), 5.0 * 9 / 8 - 1e-3, np.float32)  # 8 masks predicted, of which the one before the block has 0
    gap[0] += 2e-3
    gap[:, 2] = -100.0
    bars = {"early": 100.0, "mid": 5.0 * 7 / 8 * 9 / 8, "late": 100.0}
    assert exits(gap, **bars) == [True, False]


# Ending at EOS.


@pytest.mark.parametrize(("tokens", "last", "ends"), [(38, 1, True), (1, 1, False), (38, 2, False)])
def test_stop_at_eos(tokens, last, ends):
    """A finished block with EOS fills what follows; not an unfinished one, and not what is before it."""
    masked = np.arange(S)[None].repeat(B, 0) >= S - last
    canvas = canvas_of(masked, tokens=tokens)
    rule, scope = StopAtEos(Threshold(2.0)), scope_of(canvas, (1, 1))
    confidence = np.full((B, S), 0.5, np.float32)
    _, commits = rule.commit(SPEC, rule.init(SPEC), scope, canvas, prediction_of(confidence, {}))
    after = np.arange(P + G) >= START + S
    np.testing.assert_array_equal(commits.write[:, after], np.full((B, after.sum()), ends))
    assert (np.asarray(commits.tokens)[:, after] == MODEL.config.eos_id).all() == ends
    assert np.asarray(commits.write)[:, ~after].sum() == B


def test_stop_at_eos_sees_the_token_of_this_forward():
    canvas = canvas_of(ONE_MASKED)
    prediction = prediction_of(np.full((B, S), 0.5, np.float32), {})
    prediction = dataclasses.replace(prediction, token=jnp.full_like(prediction.token, MODEL.config.eos_id))
    rule = StopAtEos(Threshold(2.0))
    _, commits = rule.commit(SPEC, (), scope_of(canvas, (1, 1)), canvas, prediction)
    assert commits.write[:, START + S :].all()


# Schedules.


@pytest.mark.parametrize("leave_early", [False, True])
@given(st.lists(confidences, min_size=14, max_size=14), st.sampled_from((1, 2, 3)), st.sampled_from((0.6, 1.0, 2.0)))
@some
def test_slowfast_cycles(leave_early, drawn, window, deviation):
    """Phases, stretches and what fast forwards see, over one block; one token, or what is at 0.75, per forward."""
    explore, floor = 3, 0.5
    schedule = Cycles(SemiAutoregressive(S), floor, deviation, explore=explore, window=window, leave_early=leave_early)
    canvas = canvas_of(ALL_MASKED)
    state = schedule.init(SPEC)
    state = dataclasses.replace(state, blocks=dataclasses.replace(state.blocks, index=jnp.ones(B, jnp.int32)))
    keys = jax.random.split(jax.random.key(0), B)
    forwards, scopes = [[] for _ in range(B)], []
    for confidence in drawn:
        state, canvas, scope = _cycle(schedule, state, canvas, jnp.asarray(confidence), keys)
        scopes.append(jax.tree.map(np.asarray, (scope.index, scope.candidates, scope.visible)))
        before = scopes[-1][1]
        for row in range(B):
            forwards[row].append((floats(confidence[row]), np.asarray(canvas.masked)[row, START : START + S], before))
    for row in range(B):
        masked, taken = np.ones(S, bool), []
        for confidence, after, _ in forwards[row]:
            taken.append((confidence, masked, after))
            masked = after
        expected = parallel.slowfast(taken, S, explore, window, deviation, floor, leave_early)
        previous_fast = False
        for number, ((fast, first, stop), (_, before, _)) in enumerate(zip(expected, taken, strict=True)):
            index, candidates, visible = (plane[row] for plane in scopes[number])
            if index != 1:
                assert not before.any()
                break
            allowed = before & (np.arange(S) >= first) & (np.arange(S) < stop)
            np.testing.assert_array_equal(candidates[START : START + S], allowed)
            cut = fast and previous_fast
            np.testing.assert_array_equal(visible, np.arange(P + G) < (START + stop if cut else P + G))
            previous_fast = fast


@jax.jit
def _cycle(schedule, state, canvas, confidence, keys):
    """One forward: the new state and canvas, and the scope it had."""
    scope = schedule.scope(SPEC, state, canvas, keys)
    prediction = prediction_of(confidence, {})
    state, scope = schedule.observe(SPEC, state, scope, prediction)
    _, commits = Threshold(0.75).commit(SPEC, (), scope, canvas, prediction)
    canvas = dataclasses.replace(canvas, masked=canvas.masked & ~commits.write)
    return schedule.advance(SPEC, state, scope, canvas), canvas, scope


def suffix_of(seed: int, stop_at: int = 0, **fields) -> np.ndarray:
    """Kept positions of the suffix `[B, G]` at the entry of the block that ends `stop_at` positions earlier."""
    schedule = DroppedSuffix(SemiAutoregressive(S), **fields)
    canvas = canvas_of(ALL_MASKED)
    state = schedule.init(SPEC)
    state = dataclasses.replace(state, blocks=dataclasses.replace(state.blocks, index=jnp.zeros(B, jnp.int32)))
    scope = schedule.scope(SPEC, state, canvas, jax.random.split(jax.random.key(seed), B))
    visible = np.asarray(scope.visible)
    assert visible[:, : P + S].all()
    return visible[:, P:] & (np.arange(G) >= S)


def test_dropped_suffix_follows_the_density():
    """Frequencies over many draws; beyond the window nothing is kept, and rows draw differently."""
    drawn = np.concatenate([suffix_of(seed, scale=2.0, decay=3.0, window=10) for seed in range(150)])
    distance = np.arange(G) - S
    expected = 2.0 / np.sqrt(2 * np.pi) * np.exp(-0.5 * (3.0 * distance / 9) ** 2)
    expected = np.where((distance >= 0) & (distance < 10), expected, 0.0)
    np.testing.assert_allclose(drawn.mean(axis=0), expected, atol=0.09)
    assert not drawn[:, expected == 0].any()
    assert (drawn[0::2] != drawn[1::2]).any()


def test_dropped_suffix_preserves_a_number():
    for seed in range(5):
        kept = suffix_of(seed, draw="uniform", preserved=4, window=9)
        np.testing.assert_array_equal(kept.sum(axis=1), 4)
        assert not kept[:, S + 9 :].any()
    np.testing.assert_array_equal(suffix_of(0, draw="uniform", preserved=99, window=99).sum(axis=1), G - S)


def test_dropped_suffix_stays_for_the_block():
    """Drawn at the entry, kept in later forwards, drawn anew in the next block."""
    schedule = DroppedSuffix(SemiAutoregressive(S), draw="uniform", preserved=3, window=16)
    canvas, state = canvas_of(ALL_MASKED), schedule.init(SPEC)
    seen = []
    for forward in range(3):
        keys = jax.random.split(jax.random.key(forward), B)
        scope = schedule.scope(SPEC, state, canvas, keys)
        seen.append(np.asarray(scope.visible))
        state, _ = schedule.observe(SPEC, state, scope, prediction_of(EVERYTHING_QUALIFIES, {}))
        if forward == 1:  # the first block's last mask goes
            canvas = dataclasses.replace(canvas, masked=canvas.masked.at[:, START - 1].set(False))
        state = schedule.advance(SPEC, state, scope, canvas)
    np.testing.assert_array_equal(seen[0], seen[1])
    assert (seen[2][:, START : START + S]).all() and (seen[1] != seen[2]).any()


# Refusals.


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (methods.localleap(radius=-1), "radius=-1"),
        (methods.dimple(steps=7, block_length=8), "steps=7"),
        (methods.dimple(score="luck", block_length=8), "score='luck'"),
        (methods.prophet(answer_start=24, block_length=8), "answer_start=24"),
        (methods.prophet(answer_length=0, block_length=8), "answer_length=0"),
        (methods.slowfast(explore=0, block_length=8), "explore=0"),
        (methods.slowfast(window=0, block_length=8), "window=0"),
        (methods.wino(bound="never", block_length=8), "bound='never'"),
        (methods.dpad(scale=3.0, block_length=8), "scale=3.0"),
        (methods.dpad(draw="lots", block_length=8), "draw='lots'"),
        (methods.dpad(cache="triple", block_length=8), "cache='triple'"),
    ],
)
def test_bad_fields_are_refused(method, words):
    with pytest.raises(ValueError, match=words):
        make_decode(MODEL, method, gen_length=G)


def test_what_a_cache_cannot_give_is_refused():
    exit_over_a_cache = dataclasses.replace(methods.fast_dllm(block_length=8), rule=methods.prophet().rule)
    with pytest.raises(ValueError, match="generation"):
        make_decode(MODEL, exit_over_a_cache, gen_length=G)
    unverified = dataclasses.replace(methods.parallel(block_length=8), rule=Wino())
    with pytest.raises(ValueError, match="shadow"):
        make_decode(MODEL, unverified, gen_length=G)


@pytest.mark.parametrize(("name", "arguments"), [("hierarchy", ("best",)), ("slowfast", ("best",))])
def test_unknown_presets_are_refused(name, arguments):
    with pytest.raises(ValueError, match="preset='best'"):
        getattr(methods, name)(*arguments)
