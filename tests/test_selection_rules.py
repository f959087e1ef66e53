"""KLASS, DAWN, AdaBlock and the entropy-bounded sampler on hand-made predictions, against plain Python (contract 7)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from methods_table import FAMILIES, lively_params, pad, prompts_of
from oracles import selection

from polestar_jax import Reason, make_decode, methods
from polestar_jax.adaptive_blocks import AdaptiveBlocks
from polestar_jax.commit import EntropyBound
from polestar_jax.composition import combine
from polestar_jax.dependency import Dependency, independent_set
from polestar_jax.prompts import new_canvas
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.stability import Stability
from polestar_jax.types import Prediction, Prompt, Spec

P, G, S, B, V = 3, 12, 4, 2, 6
START, N = P + S, P + G  # the block in question is the second of three
MODEL = dataclasses.replace(
    FAMILIES["llada"], config=dataclasses.replace(FAMILIES["llada"].config, vocab_size=V, mask_id=5, eos_id=4)
)
SPEC = Spec(MODEL, batch=B, prompt_length=P, gen_length=G, span=S, needs=frozenset())
some = settings(derandomize=True, deadline=None, max_examples=50)

eighths = st.integers(0, 8).map(lambda i: np.float32(i / 8))  # exact in float32, which makes ties real ones
confidences = hnp.arrays(np.float32, (B, S), elements=eighths)
planes = hnp.arrays(bool, (B, S))
NOTHING_QUALIFIES, EVERYTHING_QUALIFIES = np.zeros((B, S), np.float32), np.ones((B, S), np.float32)
ALL_MASKED = np.ones((B, S), bool)
ONE_MASKED = np.arange(S)[None] == np.array([[0], [S - 1]])
CORNERS = (
    {"masked": ALL_MASKED, "confidence": NOTHING_QUALIFIES},
    {"masked": ALL_MASKED, "confidence": EVERYTHING_QUALIFIES},
    {"masked": ONE_MASKED, "confidence": NOTHING_QUALIFIES},
    {"masked": ONE_MASKED, "confidence": EVERYTHING_QUALIFIES},
    {"masked": ~ALL_MASKED, "confidence": EVERYTHING_QUALIFIES},
)


def with_corners(**others):
    """All ties, nothing and everything qualifying, a block of one masked token, a full one, beside drawn examples."""
    return lambda test: functools.reduce(lambda done, corner: example(**corner, **others)(done), CORNERS, test)


def floats(row):
    return [float(value) for value in row]


@functools.partial(jax.jit, static_argnums=0)
def _committed(index, rule, state, masked, confidence, logits, extra, seen, phase):
    """A rule's decision about block `index`: predictions of all G positions, where `seen` `[B, G]`; token = slot."""
    first = P + index * S
    canvas = new_canvas(SPEC, Prompt(jnp.ones((B, P), jnp.int32), jnp.ones((B, P), bool)))
    plane = jnp.zeros((B, N), bool).at[:, first : first + S].set(masked).at[:, first + S :].set(True)
    canvas = dataclasses.replace(canvas, masked=plane, tokens=jnp.where(plane, canvas.tokens, 1))
    schedule = SemiAutoregressive(block_length=S)
    blocks = dataclasses.replace(schedule.init(SPEC), index=jnp.full(B, index), phase=jnp.ones(B, jnp.int32))
    scope = schedule.scope(SPEC, blocks, canvas, jax.random.split(jax.random.key(0), B))
    scope = dataclasses.replace(scope, phase=phase, entering=phase == 0)
    slot = jnp.broadcast_to(jnp.arange(P, N, dtype=jnp.int32), (B, G))
    wide = jnp.full((B, G), 1.0).at[:, index * S : index * S + S].set(confidence)
    planes = {name: extra[name] for name in ("attention_received",) if name in extra}
    extra = {name: extra[name] for name in extra if name not in planes}
    prediction = Prediction(slot, seen, slot, wide, extra | {"logits": logits}, planes)
    return rule.commit(SPEC, state, scope, canvas, prediction)


def commits_of(rule, masked, confidence, *, index=1, state=None, logits=None, extra=None, seen=None, phase=(1, 1)):
    """New rule state, and the reasons `[B, S]` of the block's positions; nothing else is committed."""
    state = rule.init(SPEC) if state is None else state
    rule = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), rule)
    logits = np.zeros((B, G, V), np.float32) if logits is None else logits
    seen = np.ones((B, G), bool) if seen is None else seen
    phase = jnp.asarray(phase, jnp.int32)
    state, commits = _committed(index, rule, state, masked, confidence, logits, extra or {}, seen, phase)
    write, tokens, reason = (np.asarray(leaf) for leaf in (commits.write, commits.tokens, commits.reason))
    np.testing.assert_array_equal(write, reason != Reason.NONE)
    np.testing.assert_array_equal(tokens[write], np.nonzero(write)[1])
    block = slice(P + index * S, P + index * S + S)
    outside = np.ones(N, bool)
    outside[block] = False
    assert not write[:, outside].any() and not commits.revoke.any()
    return state, reason[:, block], np.asarray(commits.stop)


# KLASS.

logit_planes = hnp.arrays(np.float32, (B, G, V), elements=st.integers(-2, 2).map(np.float32))
VARIANTS = {
    "llada": Stability(tau_c=0.375, eps_kl=0.7),
    "dream": Stability(tau_c=0.375, eps_kl=0.7, strict=False, gate=False),
    "three": Stability(tau_c=0.25, eps_kl=1.3, history=3),
    "max_conf": Stability(tau_c=0.25, eps_kl=1.3, strategy="max_conf", gate=False),
    "min_kl": Stability(tau_c=0.25, eps_kl=1.3, strategy="min_kl", gate=False),
    "one": Stability(tau_c=0.375, eps_kl=0.7, history=1),
    "half": Stability(tau_c=0.375, eps_kl=0.7, steps=6),
}


def softmax(rows):
    weights = np.exp(rows.astype(float))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    st.lists(st.tuples(logit_planes, confidences, hnp.arrays(bool, (B, G))), min_size=2, max_size=5),
    planes,
    st.sampled_from((1, 2)),
    st.booleans(),
)
@some
def test_klass_over_several_forwards(variant, forwards, masked, index, everything):
    """Distributions are compared with those of the forward before; what a forward leaves out starts anew."""
    rule, state = VARIANTS[variant], None
    before = [[[0.0] * V for _ in range(G)] for _ in range(B)]
    past = [[[0.0] * rule.history for _ in range(G)] for _ in range(B)]
    budget = (G if rule.steps is None else rule.steps) * S // G
    for phase, (logits, confidence, seen) in enumerate(forwards[:budget]):
        seen = np.ones_like(seen) if everything else seen
        given_phase = (phase, phase)
        state, reason, stop = commits_of(
            rule, masked, confidence, index=index, state=state, logits=logits, seen=seen, phase=given_phase
        )
        now = softmax(logits)
        for row in range(B):
            for place in range(G):
                moved = selection.divergence(now[row, place], before[row][place])
                past[row][place] = [*past[row][place][1:], moved] if seen[row, place] else [0.0] * rule.history
                before[row][place] = list(now[row, place]) if seen[row, place] else [0.0] * V
            block = slice(index * S, index * S + S)
            expected = selection.klass(
                floats(confidence[row]),
                masked[row] & seen[row, block],
                past[row][block],
                rule.tau_c,
                rule.eps_kl,
                strict=rule.strict,
                gate=rule.gate,
                phase=phase,
                masks=int(masked[row].sum()),
                forwards=budget,
                strategy=rule.strategy,
            )
            np.testing.assert_array_equal(reason[row], expected)
            left = masked[row] & (reason[row] == 0)
            ends = rule.steps is not None and index == 2 and (not left.any() or phase == budget - 1)
            assert stop[row] == ends


@pytest.mark.parametrize("stable", [False, True])
@with_corners()
@given(masked=planes, confidence=confidences)
@some
def test_klass_corners(stable, masked, confidence):
    """A prediction that stands still is stable, one that is seen for the first time is not."""
    rule, logits = Stability(tau_c=0.5, eps_kl=0.01), np.ones((B, G, V), np.float32)
    state = rule.init(SPEC)
    if stable:
        for _ in range(2):
            state = commits_of(rule, ALL_MASKED, NOTHING_QUALIFIES, state=state, logits=logits)[0]
    _, reason, _ = commits_of(rule, masked, confidence, state=state, logits=logits)
    for row in range(B):
        history = [0.0, 0.0] if stable else [0.0, 27.0]
        expected = selection.klass(
            floats(confidence[row]),
            masked[row],
            [history] * S,
            0.5,
            0.01,
            strict=True,
            gate=True,
            phase=1,
            masks=0,
            forwards=S,
        )
        np.testing.assert_array_equal(reason[row], expected)


def test_klass_random_strategy_picks_any_ready_position():
    rule, logits = Stability(tau_c=0.5, strategy="random", gate=False), np.ones((B, G, V), np.float32)
    state = rule.init(SPEC)
    for _ in range(2):
        state = commits_of(rule, ALL_MASKED, NOTHING_QUALIFIES, state=state, logits=logits)[0]
    confidence = np.array([[1, 0, 1, 1], [0, 1, 0, 0]], np.float32)
    _, reason, _ = commits_of(rule, ALL_MASKED, confidence, state=state, logits=logits)
    np.testing.assert_array_equal((reason == Reason.CONFIDENCE).sum(axis=1), 1)
    assert (confidence[reason == Reason.CONFIDENCE] == 1).all()


# DAWN.

sixteenths = st.integers(0, 4).map(lambda i: np.float32(i / 16))
attentions = hnp.arrays(np.float32, (B, S, N), elements=sixteenths)
receiveds = hnp.arrays(np.float32, (B, N), elements=sixteenths)
NUMBERS = {"tau_high": 0.875, "tau_induce": 0.5, "tau_sink": 0.1875, "tau_edge": 0.1875, "tau_low": 0.25}
NO_EDGES = {"attention": np.zeros((B, S, N), np.float32), "received": np.zeros((B, N), np.float32)}
ALL_EDGES = {"attention": np.ones((B, S, N), np.float32), "received": np.zeros((B, N), np.float32)}
ALL_SINKS = {"attention": np.ones((B, S, N), np.float32), "received": np.ones((B, N), np.float32)}


def dawn_extra(attention, received):
    far = jnp.zeros((B, G, N)).at[:, S : 2 * S].set(attention)
    return {"attention": far, "attention_received": received}


@pytest.mark.parametrize("exclusion", ["neighbours", "induced"])
@with_corners(**NO_EDGES)
@with_corners(**ALL_EDGES)
@with_corners(**ALL_SINKS)
@given(masked=planes, confidence=confidences, attention=attentions, received=receiveds)
@some
def test_dawn(exclusion, masked, confidence, attention, received):
    """The prompt is an anchor; of the earlier block, what was sure when it was committed."""
    rule = Dependency(**NUMBERS, exclusion=exclusion)
    past = np.zeros((B, N), np.float32)
    past[:, :P], past[0, P], past[1, P + 1], past[1, P + 2] = 1, 0.875, 0.75, 1
    anchors = [[0, 1, 2, P], [0, 1, 2, P + 2]]
    state, reason, _ = commits_of(
        rule, masked, confidence, state=jnp.asarray(past), extra=dawn_extra(attention, received)
    )
    for row in range(B):
        expected = selection.dawn(
            floats(confidence[row]),
            masked[row],
            list(range(START, START + S)),
            attention[row],
            received[row],
            anchors[row],
            *(NUMBERS[name] for name in ("tau_high", "tau_induce", "tau_sink", "tau_edge", "tau_low")),
            exclusion,
        )
        np.testing.assert_array_equal(reason[row], expected)
    block = slice(START, START + S)
    np.testing.assert_array_equal(state[:, block], np.where(reason != 0, confidence, past[:, block]))
    np.testing.assert_array_equal(np.delete(state, np.r_[block], axis=1), np.delete(past, np.r_[block], axis=1))


def test_dawn_anchors_are_known_valid_and_before_the_blocks_end():
    """The release judges them by what the model predicts there now."""
    rule = Dependency(**NUMBERS, anchors="current")
    canvas = new_canvas(SPEC, Prompt(jnp.ones((B, P), jnp.int32), jnp.array([[False, True, True], [True] * 3])))
    canvas = dataclasses.replace(canvas, masked=canvas.masked.at[:, P].set(False).at[:, -1].set(False))
    schedule = SemiAutoregressive(block_length=S)
    scope = schedule.scope(SPEC, schedule.init(SPEC), canvas, jax.random.split(jax.random.key(0), B))
    confidence = jnp.ones((B, N)).at[0, 1].set(0.75)
    prediction = Prediction(*[jnp.zeros((B, 1))] * 4, {}, {"slot_confidence": confidence})
    found = rule._anchors(SPEC, (), scope, canvas, prediction)
    np.testing.assert_array_equal(np.argwhere(found), [[0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]])


@given(hnp.arrays(bool, (B, 5, 5)), hnp.arrays(np.float32, (B, 5), elements=eighths), hnp.arrays(bool, (B, 5)))
@some
def test_independent_set_is_independent_and_maximal(edges, score, eligible):
    edges = (edges | edges.swapaxes(1, 2)) & ~np.eye(5, dtype=bool)
    chosen = np.asarray(_independent(edges, score, eligible))
    assert not (chosen & ~eligible).any()
    for row in range(B):
        inside = np.flatnonzero(chosen[row])
        assert not edges[row][np.ix_(inside, inside)].any()
        for other in np.flatnonzero(eligible[row] & ~chosen[row]):
            surer = [i for i in inside if edges[row, i, other] and (score[row, i], -i) > (score[row, other], -other)]
            assert surer, "left out without a surer neighbour"


_independent = jax.jit(independent_set)


# The entropy bound.

entropies = hnp.arrays(np.float32, (B, S), elements=st.integers(0, 6).map(lambda i: np.float32(i / 4)))


@pytest.mark.parametrize("release", [False, True])
@with_corners(entropy=np.zeros((B, S), np.float32), gamma=-1.0)
@with_corners(entropy=np.ones((B, S), np.float32), gamma=1.0)
@given(masked=planes, confidence=confidences, entropy=entropies, gamma=st.sampled_from((0.0, 0.25, 1.0, 2.5)))
@some
def test_entropy_bound(release, masked, confidence, entropy, gamma):
    far = jnp.zeros((B, G)).at[:, S : 2 * S].set(entropy)
    _, reason, _ = commits_of(EntropyBound(gamma, release=release), masked, confidence, extra={"entropy": far})
    for row in range(B):
        expected = selection.entropy_bound(floats(confidence[row]), masked[row], floats(entropy[row]), gamma, release)
        np.testing.assert_array_equal(reason[row], expected)


# AdaBlock.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _observed(schedule, spec, threshold, start, phase, tokens, confidence):
    schedule = dataclasses.replace(schedule, delimiter_threshold=threshold)
    canvas = new_canvas(spec, Prompt(jnp.ones((B, P), jnp.int32), jnp.ones((B, P), bool)))
    canvas = dataclasses.replace(canvas, masked=canvas.masked & (jnp.arange(N)[None] >= start[:, None]))
    state = dataclasses.replace(schedule.init(spec), start=start, stop=start + 1, phase=phase)
    scope = schedule.scope(spec, state, canvas, jax.random.split(jax.random.key(0), B))
    slot = scope.start[:, None] + jnp.arange(spec.span, dtype=jnp.int32)[None]
    prediction = Prediction(slot, slot < N, tokens, confidence, {})
    return schedule.observe(spec, state, scope, prediction), scope


@pytest.mark.parametrize(("base", "window"), [(2, 0.5), (6, 0.25), (20, 0.25), (5, 0.0)])
@given(data=st.data())
@some
def test_adaptive_blocks_end_with_the_surest_delimiter(base, window, data):
    """Ties, no delimiter, one that is not sure enough, the first position, the end of the generation."""
    schedule = AdaptiveBlocks(delimiter_threshold=0.5, delimiters=(1, 3), base_length=base, window=window)
    spec = dataclasses.replace(SPEC, span=schedule.span(G))
    shape = (B, spec.span)
    tokens = data.draw(hnp.arrays(np.int32, shape, elements=st.integers(0, 4)))
    confidence = data.draw(hnp.arrays(np.float32, shape, elements=eighths))
    start = np.array(data.draw(st.tuples(*[st.integers(P, N - 1)] * B)), np.int32)
    phase = np.array(data.draw(st.tuples(*[st.integers(0, 1)] * B)), np.int32)
    threshold = data.draw(st.sampled_from((0.0, 0.5, 1.0, 2.0)))
    static = dataclasses.replace(schedule, delimiter_threshold=0.0)
    (state, scope), before = _observed(static, spec, threshold, start, phase, tokens, confidence)
    for row in range(B):
        length = selection.block_length(
            tokens[row], floats(confidence[row]), N - start[row], (1, 3), threshold, base, int(window * G)
        )
        assert state.stop[row] == scope.stop[row] == start[row] + (1 if phase[row] else length)
    np.testing.assert_array_equal(before.start, start)
    inside = (np.arange(N) >= start[:, None]) & (np.arange(N) < np.asarray(scope.stop)[:, None])
    np.testing.assert_array_equal(scope.candidates, inside)


def test_adaptive_blocks_follow_one_another():
    schedule = AdaptiveBlocks(delimiter_threshold=0.5, delimiters=(1,), base_length=4)
    spec = dataclasses.replace(SPEC, span=schedule.span(G))
    canvas = new_canvas(spec, Prompt(jnp.ones((B, P), jnp.int32), jnp.ones((B, P), bool)))
    keys = jax.random.split(jax.random.key(0), B)
    state = schedule.init(spec)
    scope = dataclasses.replace(schedule.scope(spec, state, canvas, keys), stop=jnp.array([P + 1, P + 4]))
    canvas = dataclasses.replace(canvas, masked=canvas.masked.at[:, P].set(False).at[:, P + 5].set(False))
    state = schedule.advance(spec, dataclasses.replace(state, stop=scope.stop), scope, canvas)
    np.testing.assert_array_equal(state.start, [P + 1, P])
    np.testing.assert_array_equal(state.phase, [0, 1])
    np.testing.assert_array_equal(state.index, [1, 0])
    canvas = dataclasses.replace(canvas, masked=canvas.masked.at[0, P + 1].set(False))
    scope = schedule.scope(spec, state, canvas, keys)
    np.testing.assert_array_equal(scope.start, [P + 2, P])  # what is there already is no part of the next block
    np.testing.assert_array_equal(scope.stop, [P + 6, P + 4])
    np.testing.assert_array_equal(scope.entering, [True, False])


# Under other caches.


@pytest.mark.parametrize("family", FAMILIES)
def test_dawn_over_polestar_that_refreshes_everything_is_dawn_without_a_cache(family):
    """All its forwards see the attention of the block's rows. Sinks, judged by fewer rows, are switched off."""
    model = FAMILIES[family]
    numbers = {"tau_high": 0.8, "tau_induce": 0.4, "tau_sink": 2.0, "tau_edge": 0.1, "tau_low": 0.3}
    graph = methods.dawn(block_length=4, **numbers)
    fresh = methods.polestar(
        block_length=4,
        update_threshold=-1,
        selected=8,
        selected_last=8,
        prefix_blocks=99,
        suffix_blocks=99,
        format="none",
        capacities=(1.0,),
        drift_gate=False,
        suffix_commit=False,
    )
    prompt = pad(prompts_of(model.config, (3, 7), 0), 7)
    outputs = []
    for method in (graph, combine(fresh, graph)):
        decode = make_decode(model, method, gen_length=12)
        state = decode.init(jax.random.split(jax.random.key(0), 2), 7)
        outputs.append(decode(lively_params(model, 1), state, prompt)[0])
    np.testing.assert_array_equal(outputs[0].log.token, outputs[1].log.token)
    np.testing.assert_array_equal(outputs[0].log.reason, outputs[1].log.reason)
    assert (np.asarray(outputs[0].log.reason) == Reason.DEPENDENCY).any()


# What is refused.


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda: methods.adablock(delimiters=(40,)), r"delimiters=\[40\] are no ids of a vocabulary of 6"),
        (lambda: methods.adablock(delimiters=()), "delimiters is empty"),
        (lambda: methods.adablock(delimiters=(1,), block_length=0), "base_length=0 must be at least 1"),
        (lambda: methods.klass(strategy="any", block_length=4), "strategy='any' must be one of all"),
        (lambda: methods.klass(history=0, block_length=4), "history=0 must be at least 1"),
        (lambda: methods.klass(steps=5, block_length=4), "steps=5 must be a multiple of the 3 blocks"),
        (lambda: methods.dawn(anchors="all", block_length=4), "anchors='all' must be one of committed, current"),
        (lambda: methods.dawn(attention_layers=0, block_length=4), "attention_layers=0 must be at least 1"),
        (lambda: methods.dawn("release", cache="dual", block_length=4), "slot_confidence.*does not measure"),
    ],
)
def test_what_does_not_fit_is_refused(method, message):
    with pytest.raises(ValueError, match=message):
        make_decode(MODEL, method(), gen_length=G)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: methods.klass("gms8k"), "preset='gms8k' must be one of paper"),
        (lambda: methods.dawn(tau_hi=1.0), "dawn has no field tau_hi; it has anchors"),
        (lambda: methods.adablock("llava"), "preset='llava' must be one of llada, dream"),
        (lambda: methods.adablock(first_token="entry"), "first_token='entry' is a habit of cached forwards"),
        (lambda: methods.adablock(first_token="instead"), "first_token='instead' is a habit of cached forwards"),
    ],
)
def test_unknown_words_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
