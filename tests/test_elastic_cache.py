"""Elastic-Cache: its test of drift by hand, and whole decodes against a plain loop over growing lists of rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods_table import FAMILIES, KEYS, RAGGED, TINY, lively_params, pad, prompts_of, ragged_prompts

from models.transformer import Transformer
from polestar_jax import make_decode, methods
from polestar_jax.elastic_layers import most_attended, similarity


def test_similarity_by_hand():
    """Two heads, one tracked token, three keys of which the last is a pad."""
    now = jnp.array([[[[0.6, 0.4, 0.0]], [[0.0, 1.0, 0.0]]]])
    before = jnp.array([[[[0.6, 0.4, 0.0]], [[1.0, 0.0, 0.0]]]])
    mask = jnp.array([[True, True, False]])
    np.testing.assert_allclose(similarity(now, before, mask, "keys"), [(1 + 0) / 2], atol=1e-6)
    # Key 0: (.6, 0) and (.6, 1); key 1: (.4, 1) and (.4, 0).
    by_key = [0.36 / (0.6 * np.hypot(0.6, 1)), 0.16 / (np.hypot(0.4, 1) * 0.4)]
    np.testing.assert_allclose(similarity(now, before, mask, "heads"), [np.mean(by_key)], atol=1e-6)
    for along in ("keys", "heads"):
        np.testing.assert_allclose(similarity(now, now, mask, along), 1, atol=1e-6)


def test_most_attended_by_hand():
    attention = jnp.array([[[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.0, 0.0, 1.0]]])
    looking, decoded = jnp.array([[True, True, False]]), jnp.array([[True, True, False]])
    np.testing.assert_array_equal(most_attended(attention, looking, decoded, 1), [[0]])
    np.testing.assert_array_equal(most_attended(attention, looking, decoded, 2), [[0, 1]])
    np.testing.assert_array_equal(most_attended(attention, looking, decoded, 3), [[0, 1, 0]])
    np.testing.assert_array_equal(most_attended(attention, looking, ~decoded, 1), [[2]])


@dataclasses.dataclass
class ByHand:
    """One row, decoded as the paper says, a forward at a time."""

    model: Transformer
    params: dict
    prompt: list[int]
    gen: int
    threshold: float
    gamma: float
    window: int
    track: int
    along: str

    def attention(self, query, key):
        heads, kv_heads = query.shape[1], key.shape[1]
        key = np.repeat(key, heads // kv_heads, axis=1)
        scores = np.einsum("qha,kha->hqk", query, key) * query.shape[-1] ** -0.5
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        return scores / scores.sum(-1, keepdims=True)

    def through(self, function, *planes):
        """A function of the model over rows; always of N of them, so that it is compiled once."""
        room = len(self.prompt) + self.gen
        padded = [np.concatenate([x, np.zeros((room - len(x), *x.shape[1:]), x.dtype)])[None] for x in planes]
        return jax.tree.map(lambda out: np.asarray(out)[0, : len(planes[0])], function(*padded))

    def project(self, layer, hidden, rows):
        def rotated(hidden, place):
            query, key, value = self.model.project(self.params, layer, hidden)
            return self.model.rotate(query, place), self.model.rotate(key, place), value

        return self.through(rotated, hidden, np.array(rows, np.int32))

    def finish(self, layer, hidden, attention, value):
        value = np.repeat(value, attention.shape[0] // value.shape[1], axis=1)
        attended = np.einsum("hqk,kha->qha", attention, value).astype(np.float32)
        return self.through(functools.partial(self.model.finish, self.params, layer), hidden, attended)

    def run(self):
        model, config = self.model, self.model.config
        length, shift = len(self.prompt) + self.gen, model.shift
        ids = np.array([*self.prompt, *[config.mask_id] * self.gen], np.int32)
        masks, fresh = list(range(len(self.prompt), length)), []
        everyone, layers = list(range(length)), range(config.layers)
        inputs, keys, values = ([None] * config.layers for _ in range(3))
        tracked, log = [[] for _ in layers], []
        while masks:
            window = masks[: self.window]
            first = inputs[0] is None
            union = {slot for each in tracked for slot in each}
            rows = sorted(union | set(fresh) | set(window) | {slot - shift for slot in window})
            boundary = 0 if first else config.layers
            hidden, computed, now = None, np.zeros(length, int), [None] * config.layers
            embedded = self.through(functools.partial(model.embed, self.params), ids)
            hidden = embedded if first else embedded[rows]
            for layer in layers:
                old_inputs, old_keys = inputs[layer], keys[layer]
                if first or layer > boundary:
                    inputs[layer] = hidden
                else:
                    inputs[layer] = inputs[layer].copy()
                    inputs[layer][rows] = hidden
                    hidden = inputs[layer] if layer == boundary else hidden
                ran = everyone if layer >= boundary else rows
                query, key, value = self.project(layer, hidden, ran)
                if layer >= boundary:
                    keys[layer], values[layer] = key, value
                else:
                    keys[layer], values[layer] = keys[layer].copy(), values[layer].copy()
                    keys[layer][rows], values[layer][rows] = key, value
                attention = self.attention(query, keys[layer])
                where = [ran.index(slot) for slot in tracked[layer]]
                if layer < boundary:
                    query, _, _ = self.project(layer, old_inputs[tracked[layer]], tracked[layer])
                    before, after = self.attention(query, old_keys), attention[:, where]
                    axis = {"keys": 2, "heads": 0}[self.along]
                    norm = np.linalg.norm(before, axis=axis) * np.linalg.norm(after, axis=axis)
                    if ((before * after).sum(axis) / norm).mean() < self.gamma:
                        boundary = layer + 1
                looked = attention[:, [ran.index(slot) for slot in window]].sum((0, 1))
                looked[masks] = -1
                now[layer] = [int(slot) for slot in np.argsort(-looked, kind="stable")[: self.track]]
                hidden = self.finish(layer, hidden, attention, values[layer])
                computed[ran] += 1
            tracked = now
            last = everyone if boundary < config.layers else rows
            predicting = hidden[[last.index(slot - shift) for slot in window]]
            logits = self.through(functools.partial(model.logits, self.params), predicting).astype(np.float64)
            chance = np.exp(logits - logits.max(-1, keepdims=True))
            chance /= chance.sum(-1, keepdims=True)
            chance[:, config.mask_id] = -1
            confidence, token = chance.max(-1), chance.argmax(-1)
            keep = confidence >= min(self.threshold, confidence.max())
            fresh = [slot for slot, kept in zip(window, keep, strict=True) if kept]
            ids[fresh] = token[keep]
            masks = [slot for slot in masks if slot not in fresh]
            log.append((computed, fresh, boundary))
        return ids[len(self.prompt) :], log


@functools.cache
def decoded(family: str, layers: int, window: int, **fields):
    """Our decode of the ragged prompts; and the model, weights, prompts."""
    model = Transformer(dataclasses.replace(FAMILIES[family].config, layers=layers))
    params, prompts = lively_params(model, 1), ragged_prompts(family)
    decode = make_decode(model, methods.elastic_cache(window=window, **fields), gen_length=12)
    output, _ = decode(params, decode.init(KEYS, RAGGED), pad(prompts, RAGGED))
    return model, params, prompts, jax.tree.map(np.asarray, output)


@pytest.mark.parametrize(
    ("family", "along", "track", "gamma"), [("llada", "keys", 1, 0.97), ("dream", "heads", 2, 0.93)]
)
def test_decode_equals_the_one_by_hand(family, along, track, gamma):
    """Tokens, and the layers that computed each slot in each forward: a formula of rows in itself, on four prompts."""
    fields = {"threshold": 0.6, "gamma": gamma, "track": track, "along": along}
    model, params, prompts, output = decoded(family, 4, 3, **fields)
    boundaries = set()
    for row, prompt in enumerate(prompts):
        tokens, log = ByHand(model, params, list(prompt), 12, window=3, **fields).run()
        np.testing.assert_array_equal(output.tokens[row], tokens)
        assert output.forwards[row] == len(log)
        for forward, (computed, fresh, boundary) in enumerate(log):
            boundaries.add(boundary)
            np.testing.assert_array_equal(output.log.computed[row, forward, RAGGED - len(prompt) :], computed)
            np.testing.assert_allclose(output.log.rows[row, forward], computed.sum() / 4)
            committed = np.flatnonzero(output.log.token[row, forward] >= 0) + len(prompt)
            assert committed.tolist() == fresh
    assert len(boundaries) >= 4, boundaries  # all found within forwards, not before or after


def test_end_at_eos():
    """With EOS as likely as any token, rows end when nothing is masked left of it."""
    usual = FAMILIES["llada"]
    output = decoded("llada", TINY.layers, 3, threshold=0.6)[3]
    model = Transformer(dataclasses.replace(usual.config, eos_id=int(np.bincount(output.tokens.ravel()).argmax())))
    decode = make_decode(model, methods.elastic_cache("release", window=3, threshold=0.6), gen_length=12)
    prompts = prompts_of(usual.config, (4, 9), 0)
    ended, _ = decode(lively_params(usual, 1), decode.init(KEYS[:2], RAGGED), pad(prompts, RAGGED))
    assert not ended.filled.all()
    for tokens, filled in zip(np.asarray(ended.tokens), np.asarray(ended.filled), strict=True):
        eos = np.flatnonzero((tokens == model.config.eos_id) & filled)
        assert filled.all() or (filled[: eos[0]].all() and not filled[-1])
    assert (np.asarray(ended.log.token) >= 0).sum() == np.asarray(ended.filled).sum()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"window": 0}, "window=0"),
        ({"track": 0}, "track=0"),
        ({"along": "rows"}, "along='rows'"),
        ({"preset": "x"}, "x"),
    ],
)
def test_bad_fields_are_refused(fields, word):
    with pytest.raises(ValueError, match=word):
        make_decode(FAMILIES["llada"], methods.elastic_cache(**fields), gen_length=32)
