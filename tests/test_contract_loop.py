"""One loop in many clothes: in one go or forward by forward, reused, interleaved, donated (contract 4)."""

import functools
import re

import jax
import numpy as np
from methods_table import (
    EVERYONE,
    FAMILIES,
    IN_STEP,
    KEYS,
    OTHER_NUMBERS,
    RAGGED,
    assert_same_tree,
    case_fixture,
    decode_once,
    decoder,
    host,
    lets_mask_win,
    lively_params,
    pad,
    ragged_prompts,
)

from polestar_jax import Decode
from polestar_jax import decode as loop
from polestar_jax.types import NO_FORWARD, NOTHING, REVOKED

case = case_fixture()


def started(family: str, name: str, seed: int = 0):
    decode, params = decoder(family, name), lively_params(FAMILIES[family], 1)
    state = decode.init(KEYS, RAGGED)
    return decode, params, decode.start(state, pad(ragged_prompts(family, seed), RAGGED))


@functools.cache
def stepped(family: str, name: str, seed: int = 0):
    """A decode in the Python loop: final state, canvases from the first to the last, and what every pass did."""
    decode, params, state = started(family, name, seed)
    canvases, passes = [host(state.canvas)], []
    while not decode.finished(state).all():
        state, log = decode.step(params, state)
        canvases.append(host(state.canvas))
        passes.append(host(log))
    return host(state), canvases, passes


def test_python_loop_equals_while_loop(case):
    family, name = case
    decode, params = decoder(family, name), lively_params(FAMILIES[family], 1)
    output, final = decode(params, decode.init(KEYS, RAGGED), pad(ragged_prompts(family), RAGGED))
    state, _, passes = stepped(family, name)
    assert_same_tree(host(final), state, atol=1e-4)
    np.testing.assert_array_equal(output.tokens, state.canvas.tokens[:, RAGGED:])
    np.testing.assert_array_equal(output.forwards, state.forwards)
    assert_same_tree(host(output.log), state.log, atol=1e-4)
    for row in EVERYONE:
        own = [log for log in passes if log.kind[row] != NO_FORWARD]
        assert len(own) == state.forwards[row]
        for field in ("kind", "rows", "rows_executed", "token", "reason", "computed"):
            recorded = getattr(state.log, field)[row, : len(own)]
            np.testing.assert_array_equal(np.stack([getattr(log, field)[row] for log in own]), recorded, err_msg=field)


def test_only_commits_change_the_canvas(case):
    """The prompt never changes, and a position only by a commit or a declared revocation of that pass."""
    family, name = case
    _, canvases, passes = stepped(family, name)
    mask, rewrites = FAMILIES[family].config.mask_id, decoder(family, name).method.rule.revokes
    for before, after, log in zip(canvases[:-1], canvases[1:], passes, strict=True):
        written, revoked = log.token >= 0, log.token == REVOKED
        assert (written | revoked | (log.token == NOTHING)).all()
        expected = np.where(written, log.token, np.where(revoked, mask, before.tokens[:, RAGGED:]))
        np.testing.assert_array_equal(after.tokens[:, RAGGED:], expected)
        np.testing.assert_array_equal(after.masked[:, RAGGED:], before.masked[:, RAGGED:] & ~written | revoked)
        assert rewrites or not revoked.any()
        assert rewrites or not (written & ~before.masked[:, RAGGED:]).any(), "a token was committed twice"
        assert not after.masked[:, :RAGGED].any()
        for field in ("valid", "position"):
            np.testing.assert_array_equal(getattr(after, field), getattr(before, field))
        np.testing.assert_array_equal(after.tokens[:, :RAGGED], before.tokens[:, :RAGGED])
        waiting = log.kind == NO_FORWARD
        assert not written[waiting].any() and not revoked[waiting].any()


def test_some_rows_waited(case):
    """The scenario is one in which waiting happens wherever a method has kinds of forwards to wait for."""
    family, name = case
    decode = decoder(family, name)
    _, canvases, passes = stepped(family, name)
    unfinished = [canvas.masked.any(axis=1) for canvas in canvases[:-1]]
    waits = sum((log.kind[live] == NO_FORWARD).sum() for log, live in zip(passes, unfinished, strict=True))
    kinds = len(decode.method.cache.branches(decode.spec(len(KEYS), RAGGED)))
    assert waits > 0 if kinds > 1 and name not in IN_STEP else waits == 0


def test_reused_state_equals_a_fresh_one(case):
    family, name = case
    decode, params = decoder(family, name), lively_params(FAMILIES[family], 1)
    _, used = decode(params, decode.init(KEYS, RAGGED), pad(ragged_prompts(family, seed=1), RAGGED))
    again = decode(params, used, pad(ragged_prompts(family), RAGGED))
    fresh = decode(params, decode.init(KEYS, RAGGED), pad(ragged_prompts(family), RAGGED))
    assert_same_tree(host(again[0]), host(fresh[0]))
    for part in ("keys", "canvas", "schedule", "rule", "log"):
        assert_same_tree(host(getattr(again[1], part)), host(getattr(fresh[1], part)))


def test_interleaved_decodes_equal_serial_ones(case):
    family, name = case
    decode, params, first = started(family, name, seed=0)
    _, _, second = started(family, name, seed=1)
    states = [first, second]
    while not all(decode.finished(state).all() for state in states):
        for i, state in enumerate(states):
            if not decode.finished(state).all():
                states[i], _ = decode.step(params, state)
    for seed, state in enumerate(states):
        assert_same_tree(host(state), stepped(family, name, seed)[0])


def test_numbers_and_second_calls_do_not_recompile(case):
    family, name = case
    decode_once(family, name, EVERYONE, RAGGED)
    before, decode = loop._decode._cache_size(), decoder(family, name)
    params, prompt = lively_params(FAMILIES[family], 1), pad(ragged_prompts(family), RAGGED)
    named = decoder(family, name, **OTHER_NUMBERS.get(name, {}))
    leaves = Decode(decode.model, jax.tree.map(lambda leaf: leaf * 0.75 + 0.125, decode.method), decode.gen_length)
    for other in (decode, named, leaves):
        _, state = other(params, other.init(KEYS, RAGGED), prompt)
        output, _ = other(lively_params(FAMILIES[family], 2), state, pad(ragged_prompts(family, seed=1), RAGGED))
        assert output.filled.all() or lets_mask_win(decode)
    assert loop._decode._cache_size() == before


def is_bulk(path) -> bool:
    """Random keys, cached keys and values; the small rest of a used state is made anew by the next decode."""
    return bool(re.match(r"\.keys|\.cache\.(keys|values)\[", jax.tree_util.keystr(path)))


def test_donated_state_is_reused(case):
    family, name = case
    decode, params = decoder(family, name), lively_params(FAMILIES[family], 1)
    given = jax.random.split(jax.random.key(7), len(KEYS))
    state, prompt = decode.init(given, RAGGED), pad(ragged_prompts(family), RAGGED)
    _, following = decode(params, state, prompt)
    begun = decode.start(following, prompt)
    after, _ = decode.step(params, begun)
    for used in (state, following):
        for path, leaf in jax.tree_util.tree_leaves_with_path(used):
            assert leaf.is_deleted() or not is_bulk(path), jax.tree_util.keystr(path)
    for path, leaf in jax.tree_util.tree_leaves_with_path(begun):
        assert leaf.is_deleted(), jax.tree_util.keystr(path)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((given, params, prompt, after)))


def test_compiled_loop_stays_on_the_device(case):
    """No host callback, infeed or outfeed; every donated buffer that the program reads is aliased to a result."""
    family, name = case
    decode, params = decoder(family, name), lively_params(FAMILIES[family], 1)
    state, prompt = decode.init(KEYS, RAGGED), pad(ragged_prompts(family), RAGGED)
    text = loop._decode.lower(decode.spec(len(KEYS), RAGGED), decode.method, params, state, prompt).compile().as_text()
    for word in ("infeed", "outfeed", "callback", "send(", "recv("):
        assert word not in text
    header = text[: text.index("entry_computation_layout")]
    reused = [path for path, _ in jax.tree_util.tree_leaves_with_path(state) if is_bulk(path)]
    assert "input_output_alias" in header and header.count("-alias)") >= len(reused)
