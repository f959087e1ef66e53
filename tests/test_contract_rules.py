"""Every decision on hand-made inputs against its transcription in plain Python (contract 7), and corner cases."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from methods_table import FAMILIES, lively_params
from oracles import kmeans, llada, quantize, rules

from polestar_jax import Reason, methods
from polestar_jax.attention import unrotated
from polestar_jax.commit import Factor, PolestarCommit, Quota, Threshold
from polestar_jax.drift import drift, log_attention
from polestar_jax.head import choose
from polestar_jax.polestar_cache import FULL_ENTRY, REFRESH, STEP, WINDOW_ENTRY
from polestar_jax.prompts import new_canvas
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Prediction, Prompt, Spec
from polestar_jax.window import LayerWindow, decode_rows, encode, patch, rank_rows, select_rows, window_slots

MODEL = FAMILIES["llada"]
P, G, S = 3, 12, 4
SPEC = Spec(MODEL, batch=2, prompt_length=P, gen_length=G, span=S, needs=frozenset({"drift", "suffix"}))
START = P + S  # the block in question is the second one
some = settings(derandomize=True, deadline=None, max_examples=60)

# Eighths are exact in float32 and so are their squares, which makes ties real ones.
eighths = st.integers(0, 8).map(lambda i: np.float32(i / 8))
confidences = hnp.arrays(np.float32, (2, 2 * S), elements=eighths)
planes = hnp.arrays(bool, (2, 2 * S))


def canvas_with(masked: np.ndarray):
    """A canvas whose block and suffix block have these masks; a committed position holds token 1."""
    prompt = Prompt(jnp.ones((2, P), jnp.int32), jnp.ones((2, P), bool))
    plane = jnp.zeros((2, P + G), bool).at[:, START : START + 2 * S].set(masked)
    canvas = new_canvas(SPEC, prompt)
    return dataclasses.replace(canvas, masked=plane, tokens=jnp.where(plane, canvas.tokens, 1))


def scope_of(canvas, phase):
    """The scope of the second block's forward number `phase`, `[2]`."""
    schedule = SemiAutoregressive(block_length=S)
    blocks = dataclasses.replace(schedule.init(SPEC), index=jnp.ones(2, jnp.int32), phase=jnp.asarray(phase, jnp.int32))
    return schedule.scope(SPEC, blocks, canvas, jax.random.split(jax.random.key(0), 2))


def prediction_of(confidence, drifts=None, selected=None, valid=None):
    """Predictions of the block's four positions and of the four of the suffix, token = slot."""
    slot = jnp.broadcast_to(jnp.arange(START, START + 2 * S, dtype=jnp.int32), (2, 2 * S))
    suffix = slot >= START + S
    extra = {"drift": jnp.zeros(slot.shape) if drifts is None else jnp.asarray(drifts), "suffix": suffix}
    chosen = ~suffix if selected is None else ~suffix | jnp.asarray(selected)
    return Prediction(slot, chosen if valid is None else chosen & valid, slot, jnp.asarray(confidence), extra)


@jax.jit
def _committed(rule, state, masked, confidence, drifts, selected, phase):
    canvas = canvas_with(masked)
    scope = scope_of(canvas, phase)
    return rule.commit(SPEC, state, scope, canvas, prediction_of(confidence, drifts, selected))


def reasons_of(rule, masked, confidence, drifts=None, selected=None, phase=(1, 1), state=None):
    """New rule state, reasons `[2, 2 S]` of the block's and the suffix's positions."""
    zeros = np.zeros((2, 2 * S), np.float32)
    state = rule.init(SPEC) if state is None else state
    rule = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), rule)
    drifts = zeros if drifts is None else drifts
    selected = zeros > 0 if selected is None else selected
    state, commits = _committed(rule, state, masked, confidence, drifts, selected, np.array(phase))
    write, tokens, reason = (np.asarray(leaf) for leaf in (commits.write, commits.tokens, commits.reason))
    np.testing.assert_array_equal(write, reason != Reason.NONE)
    np.testing.assert_array_equal(tokens[write], np.nonzero(write)[1])  # the token is the slot
    assert not commits.revoke.any() and not commits.stop.any()
    outside = np.ones(P + G, bool)
    outside[START : START + 2 * S] = False
    assert not reason[:, outside].any()
    return state, reason[:, START : START + 2 * S]


def by_hand(rule, masked, confidence):
    """Reasons of a rule that only looks at the block."""
    block = [rule([float(c) for c in confidence[row, :S]], masked[row, :S]) for row in range(2)]
    return np.concatenate([block, np.zeros((2, S), int)], axis=1)


# Eq. 1.


@given(hnp.arrays(np.float32, (2, 3, 5), elements=st.integers(-3, 3)), st.integers(0, 4))
@some
def test_prediction_is_the_likeliest_token_but_mask(logits, mask_id):
    model = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, mask_id=mask_id))
    spec = dataclasses.replace(SPEC, model=model)
    token, confidence = choose(spec, jnp.asarray(logits), jnp.asarray(logits), allow_mask=False)
    for row in np.ndindex(2, 3):
        expected, probability = rules.predict([float(v) for v in logits[row]], mask_id)
        assert token[row] == expected
        np.testing.assert_allclose(confidence[row], probability, rtol=1e-5)


# Commit rules of the compared methods.


@given(planes, confidences, eighths)
@some
def test_threshold(masked, confidence, tau):
    expected = by_hand(lambda c, ok: rules.threshold(c, ok, float(tau)), masked, confidence)
    np.testing.assert_array_equal(reasons_of(Threshold(tau), masked, confidence)[1], expected)


@pytest.mark.parametrize("release", [False, True])
@given(masked=planes, confidence=confidences, factor=st.sampled_from((0.125, 0.5, 1.0, 1.5, 3.0)))
@some
def test_factor(release, masked, confidence, factor):
    expected = by_hand(lambda c, ok: rules.factor(c, ok, factor, release), masked, confidence)
    np.testing.assert_array_equal(reasons_of(Factor(factor, release=release), masked, confidence)[1], expected)


@pytest.mark.parametrize("forwards", [1, 2, 3, 4])
@given(masked=planes, confidence=confidences)
@some
def test_quota(forwards, masked, confidence):
    """A whole block by its quota, masks and confidences as they come."""
    rule, masked = Quota(steps=forwards * G // S), masked.copy()
    at_entry, state = masked[:, :S].sum(axis=1), None
    for phase in range(forwards):
        state, reason = reasons_of(rule, masked, confidence, phase=(phase, phase), state=state)
        for row in range(2):
            c = [float(v) for v in confidence[row, :S]]
            expected = rules.quota(c, masked[row, :S], int(at_entry[row]), forwards, phase)
            np.testing.assert_array_equal(reason[row, :S], expected)
        masked[reason != 0] = False
    assert not masked[:, :S].any()


def test_random_remasking_draws_by_row_block_and_position():
    """The quota's count, drawn anew in every forward, whatever the confidences."""
    rule, masked = Quota(steps=6, remasking="random"), np.ones((2, 2 * S), bool)
    canvas, confidence = canvas_with(masked), np.linspace(0, 1, 16, dtype=np.float32).reshape(2, 8)
    scope = scope_of(canvas, np.zeros(2, int))
    picks = set()
    for seed in range(40):
        scope = dataclasses.replace(scope, keys=jax.random.split(jax.random.key(seed), 2))
        _, commits = rule.commit(SPEC, rule.init(SPEC), scope, canvas, prediction_of(confidence))
        draw = np.stack([jax.random.uniform(key, (G,)) for key in scope.keys])[:, S : 2 * S]
        for row in range(2):
            expected = rules.quota(list(draw[row]), masked[row, :S], S, 2, 0)
            np.testing.assert_array_equal(commits.reason[row, START : START + S], expected)
        picks.add(tuple(np.nonzero(np.asarray(commits.write[0]))[0]))
    assert len(picks) == 6  # all pairs of four


# Drift and the gate of section 4.2.


@given(st.integers(0, 10**6))
@some
def test_drift_is_the_mean_divergence_of_the_heads(seed):
    random = np.random.default_rng(seed)
    scores = random.normal(0, 3, (2, 2, 3, 4, 6)).astype(np.float32)  # now and before, B, H, R, N
    scores[..., 4:] = -1e30  # keys that nobody sees
    now, before = (log_attention(jnp.asarray(part), mean_heads=False) for part in scores)
    found = drift(now, before)
    mean_found = drift(*(log_attention(jnp.asarray(part), mean_heads=True) for part in scores))
    p, q = (llada.softmax(part.astype(float)) for part in scores)
    for b in range(2):
        for r in range(4):
            np.testing.assert_allclose(found[b, r], rules.drift(p[b, :, r], q[b, :, r]), atol=1e-5)
            mean = rules.drift(p[b, :, r].mean(0, keepdims=True), q[b, :, r].mean(0, keepdims=True))
            np.testing.assert_allclose(mean_found[b, r], mean, atol=1e-5)
    np.testing.assert_array_equal(drift(now, now), 0)


@given(
    st.lists(st.tuples(confidences, confidences, st.tuples(st.booleans(), st.booleans())), min_size=1, max_size=7),
    planes,
    st.sampled_from((0, 1, 3, 8)),
    st.sampled_from((0.5, 2.0)),
)
@some
def test_polestar_commit_over_several_forwards(forwards, masked, history, alpha):
    """Drifts of earlier forwards, emptied at entries (in one row and not in the other), where the gate stays shut."""
    masked = masked | (np.arange(2 * S) == 0)  # a block without masks is not entered: the schedule skips it
    rule, state = PolestarCommit(tau=0.75, alpha=alpha, history=history, suffix_tau=0.875), None
    past = [[[] for _ in range(S)] for _ in range(2)]
    for confidence, drifts, entering in forwards:
        drifts = drifts * 2
        selected = confidence > 0.5
        phase = [0 if entry else 3 for entry in entering]
        state, reason = reasons_of(rule, masked, confidence, drifts, selected, phase, state)
        for row in range(2):
            if entering[row]:
                past[row] = [[] for _ in range(S)]
            c = [float(v) for v in confidence[row]]
            deltas = [rules.delta(float(drifts[row, i]), past[row][i], history) for i in range(S)]
            block = rules.polestar(c[:S], masked[row, :S], deltas, 0.75, alpha, entering[row])
            suffix = rules.suffix(c[S:], masked[row, S:] & selected[row, S:], 0.875)
            np.testing.assert_array_equal(reason[row], [*block, *suffix])
            if not entering[row]:
                for i in range(S):
                    past[row][i].append(float(drifts[row, i]))


@given(confidences, confidences, planes)
@some
def test_gate_floor_and_ceiling(confidence, drifts, masked):
    """The release asks for more before its gate opens."""
    rule = PolestarCommit(tau=0.75, alpha=2.0, gate_floor=0.25, gate_ceiling=0.75, suffix_tau=2.0)
    _, reason = reasons_of(rule, masked, confidence, drifts)
    for row in range(2):
        c, deltas = [float(v) for v in confidence[row, :S]], [float(v) for v in drifts[row, :S]]
        expected = rules.polestar(c, masked[row, :S], deltas, 0.75, 2.0, False, floor=0.25, ceiling=0.75)
        np.testing.assert_array_equal(reason[row, :S], expected)


RULES = {
    "threshold": Threshold(0.75),
    "factor": Factor(1.0),
    "quota": Quota(),
    "polestar": PolestarCommit(tau=0.75, suffix_tau=0.75),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_corner_cases(rule):
    """Nothing qualifies, ties, one position left, none left, everything qualifies."""
    everything, sure, unsure = np.ones((2, 2 * S), bool), np.ones((2, 2 * S)), np.full((2, 2 * S), 0.125)
    parallel = not isinstance(rule, Quota)
    commits = lambda masked, confidence: reasons_of(rule, masked, confidence.astype(np.float32), phase=(0, 0))[1][:, :S]

    tied = [[Reason.FORCED, 0, 0, 0]] * 2
    np.testing.assert_array_equal(commits(everything, unsure), tied)
    first = commits(everything, sure)
    np.testing.assert_array_equal(first, [[Reason.CONFIDENCE] * S] * 2 if parallel else tied)
    last = np.zeros((2, 2 * S), bool)
    last[:, 2] = True
    np.testing.assert_array_equal(commits(last, unsure), [[0, 0, Reason.FORCED, 0]] * 2)
    np.testing.assert_array_equal(commits(~everything, sure), [[0] * S] * 2)


def test_suffix_commits_are_never_forced():
    rule, everything = PolestarCommit(tau=0.75, suffix_tau=0.75), np.ones((2, 2 * S), bool)
    _, reason = reasons_of(rule, everything, np.full((2, 2 * S), 0.5, np.float32), selected=everything)
    assert not reason[:, S:].any() and (reason[:, :S] == Reason.FORCED).sum() == 2
    sure = np.full((2, 2 * S), 0.75, np.float32)
    _, reason = reasons_of(rule, everything, sure, selected=~everything)
    assert not reason[:, S:].any(), "rows outside the packet have no say"
    _, reason = reasons_of(rule, everything, sure, selected=everything)
    assert (reason[:, S:] == Reason.SUFFIX).all()
    off = dataclasses.replace(rule, suffix_commit=False)
    assert not reasons_of(off, everything, sure, selected=everything)[1][:, S:].any()


def test_gate_is_shut_at_entries_and_when_switched_off():
    rule, everything = PolestarCommit(tau=0.75), np.ones((2, 2 * S), bool)
    unsure, drifts = np.full((2, 2 * S), 0.5, np.float32), np.full((2, 2 * S), 99, np.float32)
    count = lambda rule, phase: (reasons_of(rule, everything, unsure, drifts, phase=phase)[1] == Reason.DRIFT).sum(1)
    np.testing.assert_array_equal(count(rule, (0, 1)), [0, S])
    np.testing.assert_array_equal(count(dataclasses.replace(rule, drift_gate=False), (0, 1)), [0, 0])


# Polestar-Cache: when, where and what.


def policy(**fields):
    return methods.polestar(block_length=S, **fields).cache


@pytest.mark.parametrize("period", [0, 1, 2, 3, 4])
def test_entry_kinds(period):
    cache = policy(window_entry_period=period)
    state, canvas = cache.init(SPEC), canvas_with(np.ones((2, 2 * S), bool))
    for index in range(8):
        scope = dataclasses.replace(scope_of(canvas, (0, 0)), index=jnp.full(2, index, jnp.int32))
        expected = FULL_ENTRY if rules.entry_is_full(index, period) else WINDOW_ENTRY
        np.testing.assert_array_equal(cache.kind(SPEC, state, scope), expected)


@pytest.mark.parametrize("preset", ["paper", "release"])
def test_update_schedule(preset):
    """What counts and when it is too much: EOS in the release only, suffix commits never."""
    cache = methods.polestar(preset, block_length=S).cache
    eos, suffix = MODEL.config.eos_id, Reason.SUFFIX
    histories = ([(1, 1)] * 4, [(1, 3)] * 3, [(eos, 2)] * 5, [(1, suffix)] * 5, [(1, 1), (2, 1), (3, 2)], [(1, 3)] * 2)
    canvas = canvas_with(np.ones((2, 2 * S), bool))
    everything = prediction_of(np.ones((2, 2 * S)))
    for history in histories:
        state, running = cache.init(SPEC), 0
        for token, reason in history:  # one commit per forward in row 0, the same one twice in row 1
            running += reason != suffix and (preset == "release" or token != eos)
            at = np.zeros((2, P + G), bool)
            at[0, START], at[1, START : START + 2] = True, True
            _, commits = Threshold(0.0).commit(SPEC, (), scope_of(canvas, (1, 1)), canvas, everything)
            commits = dataclasses.replace(
                commits, write=at, tokens=np.where(at, token, 0), reason=np.where(at, reason, 0).astype(np.uint8)
            )
            state = cache.observe(SPEC, state, None, None, jax.tree.map(jnp.asarray, commits))
            last = int(reason != suffix and (preset == "release" or token != eos))
            for row, (cumulative, latest) in enumerate(((running, last), (2 * running, 2 * last))):
                stale = cumulative > 3 if preset == "paper" else cumulative > 2 or latest > 1
                kind = cache.kind(SPEC, state, scope_of(canvas, (1, 1)))[row]
                assert kind == (REFRESH if stale else STEP), (history, row)


@given(st.integers(0, 2), st.integers(0, 2), st.integers(0, P - 1), st.integers(0, G // S - 1))
@some
def test_window_slots(prefix_blocks, suffix_blocks, pads, index):
    """Valid positions only, in order, the regions by side."""
    prefix, suffix = prefix_blocks * S, suffix_blocks * S
    valid = jnp.broadcast_to(jnp.arange(P) >= pads, (2, P))
    canvas = new_canvas(SPEC, Prompt(jnp.ones((2, P), jnp.int32), valid))
    schedule = SemiAutoregressive(block_length=S)
    blocks = dataclasses.replace(schedule.init(SPEC), index=jnp.full(2, index, jnp.int32))
    scope = schedule.scope(SPEC, blocks, canvas, jax.random.split(jax.random.key(0), 2))
    slot, region = (np.asarray(found[0]) for found in window_slots(SPEC, canvas, scope, prefix, suffix))
    start = P + index * S
    expected, side = rules.window(start, start + S, P + G, pads, prefix, suffix)
    np.testing.assert_array_equal(slot[region >= 0], expected)
    np.testing.assert_array_equal(region[region >= 0], side)


@given(
    hnp.arrays(np.float32, (2, 6), elements=eighths),
    hnp.arrays(np.int32, (2, 9), elements=st.integers(-1, 5)),
    st.integers(0, 7),
)
@example(np.zeros((2, 6), np.float32), np.arange(18, dtype=np.int32).reshape(2, 9) % 6, 3)
@some
def test_top_clusters(drifts, labels, k):
    """Which rows are chosen, and that their places are 0, 1, ..."""
    counts = (labels[:, :, None] == np.arange(6)).sum(axis=1, dtype=np.int32)
    arguments = jnp.asarray(drifts), jnp.asarray(counts), jnp.asarray(labels), rank_rows(jnp.asarray(labels))
    for memberless in (False, True):
        chosen, place = map(np.asarray, select_rows(*arguments, jnp.float32(k), memberless=memberless))
        for row in range(2):
            competing = np.ones(6) if memberless else counts[row]
            expected = rules.top_clusters([float(d) for d in drifts[row]], competing, k)
            np.testing.assert_array_equal(chosen[row], np.isin(labels[row], list(expected)))
            assert sorted(place[row][chosen[row]]) == list(range(chosen[row].sum()))


def test_proxies_have_no_position():
    """Un-rotating cached keys gives what the projection gave; a query at position 0 is not rotated."""
    weights = llada.Weights(lively_params(MODEL, 0), MODEL.config)
    hidden = np.random.default_rng(0).normal(size=(5, MODEL.config.model_size))
    query, key, _ = weights.project(0, hidden)
    position = np.array([0, 3, 4, 17, 60])
    cached = jnp.asarray(weights.rotate(key, position), jnp.float32)[None].swapaxes(1, 2)
    plain = unrotated(MODEL, cached, jnp.asarray(position)[None]).swapaxes(1, 2)[0]
    np.testing.assert_allclose(plain, key, atol=1e-5)
    np.testing.assert_allclose(MODEL.rotate(jnp.asarray(query, jnp.float32), jnp.zeros(5, jnp.int32)), query, atol=1e-6)


@functools.cache
def window_of(format, residual=True):
    """A clustered, coded window of one batch row, its rows and its k-means by hand."""
    random = np.random.default_rng(3)
    rows, region = random.normal(size=(12, 32)).astype(np.float32), np.array([-1] * 2 + [0] * 6 + [1] * 4)
    labels, centroids, counts = kmeans.kmeans(rows, region, 4, 5)
    anchors = jnp.asarray(centroids, jnp.float32)[None] if residual and format != "none" else None
    labels = jnp.asarray(labels, jnp.int32)[None]
    window = LayerWindow(
        codes=encode(jnp.asarray(rows)[None], anchors, labels, format, False),
        anchors=anchors,
        centroids=jnp.asarray(centroids, jnp.float32)[None],
        labels=labels,
        counts=jnp.asarray(counts, jnp.int32)[None],
        reference=jnp.zeros((1, 1, 4, 12)),
    )
    return window, rows


def stored(format, row, anchor):
    """What is left of a row that was coded relative to an anchor."""
    return row if format == "none" else anchor + getattr(quantize, format)(row - anchor)[-1]


@pytest.mark.parametrize("format", ["none", "nvfp4", "mxfp4", "int8"])
def test_rows_are_coded_relative_to_the_entrys_centroid(format):
    """Also after the centroid moved away; rows that did not change keep their codes."""
    window, rows = window_of(format)
    labels, anchors = np.asarray(window.labels[0]), np.asarray(window.centroids[0], float)
    inside = labels >= 0
    now = np.asarray(decode_rows(window, format)[0])
    for i in np.nonzero(inside)[0]:
        np.testing.assert_allclose(now[i], stored(format, rows[i].astype(float), anchors[labels[i]]), atol=1e-5)

    changed = inside & (np.arange(12) % 3 == 0)
    packet = np.random.default_rng(4).normal(2, 1, rows.shape).astype(np.float32)
    where = jnp.asarray(changed)[None]
    patched, moved = patch(window, decode_rows(window, format), jnp.asarray(packet)[None], where, 0.0)
    np.testing.assert_array_equal(patched[0, changed], packet[changed])
    np.testing.assert_array_equal(patched[0, ~changed], now[~changed])
    for cluster in range(4):
        members = labels == cluster
        step = (np.where(changed[:, None], packet, now) - now)[members].sum(axis=0) / max(members.sum(), 1)
        np.testing.assert_allclose(moved[0, cluster], anchors[cluster] + step, atol=1e-5)

    codes = encode(patched, window.anchors, window.labels, format, False, kept=(window.codes, where))
    after = dataclasses.replace(window, codes=codes, centroids=moved)
    again = np.asarray(decode_rows(after, format)[0])
    np.testing.assert_array_equal(again[inside & ~changed], now[inside & ~changed])
    for i in np.nonzero(changed)[0]:
        np.testing.assert_allclose(again[i], stored(format, packet[i].astype(float), anchors[labels[i]]), atol=1e-5)


# The schedule.


def test_finished_blocks_are_skipped_and_counted():
    schedule, tokens = SemiAutoregressive(block_length=S), jnp.ones((2, P + G), jnp.int32)
    canvas = dataclasses.replace(canvas_with(np.zeros((2, 2 * S), bool)), tokens=tokens)
    state = schedule.init(SPEC)
    masked = np.zeros((2, P + G), bool)
    masked[0, P + 1], masked[:, -1] = True, True  # row 0 is still in its first block, row 1 has its second one done
    scope = schedule.scope(SPEC, state, canvas, jax.random.split(jax.random.key(0), 2))
    after = schedule.advance(SPEC, state, scope, dataclasses.replace(canvas, masked=jnp.asarray(masked)))
    np.testing.assert_array_equal(after.index, [0, 2])
    np.testing.assert_array_equal(after.phase, [1, 0])
    scope = schedule.scope(SPEC, after, dataclasses.replace(canvas, masked=jnp.asarray(masked)), scope.keys)
    np.testing.assert_array_equal(scope.entering, [False, True])
    np.testing.assert_array_equal(scope.start, [P, P + 2 * S])
    np.testing.assert_array_equal(np.argwhere(np.asarray(scope.candidates)), [[0, P + 1], [1, P + G - 1]])
