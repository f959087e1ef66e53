"""The rows that cards promise, on prompts of four lengths, recounted from what the log says was committed.

Three sizes of generation and block; `ELSEWHERE` says where the rows of the other methods are tested.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from methods_table import BLOCK_LENGTH, CASES, EVERYONE, FAMILIES, GEN_LENGTH, LENGTHS, RAGGED, decode_once, decoder

from polestar_jax.feature_cache import KINDS
from polestar_jax.methods import METHODS
from polestar_jax.types import REVOKED

WHOLE = (
    *("vanilla", "parallel", "entropy_bound", "dream", "prophet", "hierarchy", "localleap", "dimple"),
    *("klass", "dawn_release", "adablock"),
)
BLOCKS = ("dual", "prefix", "dual_entry", "prefix_instead", "klass_dual", "dawn_dual", "adablock_dual")
ELSEWHERE = {
    "d2cache": "test_d2cache.py::test_rows_follow_the_formula",
    "elastic_cache": "test_elastic_cache.py::test_decode_equals_the_one_by_hand",
    "entropy_cache": "test_entropy_cache.py::test_rows_follow_the_formula",
}
TABLE = (GEN_LENGTH, BLOCK_LENGTH)
SHAPES = [*((family, TABLE) for family in FAMILIES), ("llada", (32, 8)), ("llada", (24, 6))]
"""Families with G and S. Both have the table's, whose programs the contracts share; one of them the others."""


def on_every_shape(*names: str):
    """Parametrizes by family, shape and method, where the family has it."""
    found = [(family, shape, name) for name in names for family, shape in SHAPES if (family, name) in CASES]
    label = lambda case: f"{case[0]}-{'x'.join(map(str, case[1]))}-{case[2]}"
    return pytest.mark.parametrize(("family", "shape", "name"), found, ids=map(label, found))


class Spent(NamedTuple):
    """A forward of a batch row. Slots count from the prompt's first token, places from the generation's.

    Attributes:
      prompt: length of the prompt.
      number, phase: forwards that the row and its block had before.
      block: the block's number, from 0.
      kind, rows: as in the log.
      computed: by slot, layers that computed it.
      masked, earlier: by place, whether it was masked before this forward, and before the one before it.
      committed: by place.
    """

    prompt: int
    number: int
    phase: int
    block: int
    kind: str
    rows: float
    computed: np.ndarray
    masked: np.ndarray
    earlier: np.ndarray
    committed: np.ndarray


def own(shape):
    """What `decoder` is given for a shape; nothing for the table's, for the contracts' programs."""
    return () if shape == TABLE else shape


def forwards_of(family: str, shape, name: str) -> Iterator[Spent]:
    """Every forward of every row."""
    output = decode_once(family, name, EVERYONE, RAGGED, shape=own(shape))
    kinds, log = decoder(family, name, *own(shape)).kinds, output.log
    for row, prompt in enumerate(LENGTHS):
        masked = earlier = np.ones(shape[0], bool)
        phase, block = -1, 0
        for number in range(output.forwards[row]):
            now, token = int(np.argmax(masked)) // shape[1], log.token[row, number]
            phase, block = phase + 1 if now == block else 0, now
            yield Spent(
                *(prompt, number, phase, block, kinds[log.kind[row, number]], log.rows[row, number]),
                *(log.computed[row, number, RAGGED - prompt :], masked, earlier, token >= 0),
            )
            earlier, masked = masked, (masked & (token < 0)) | (token == REVOKED)


def test_every_method_is_listed_once():
    here = {"fast_dllm": "dual", "dawn": "dawn_release"}
    alone = ("slowfast", "polestar", "wino", "freecache", "dpad", "sparse_dllm")
    features = ("dllm_cache", "dynamic_dllm", "dkv_cache", "dkv_cache_greedy")
    assert {*WHOLE, *here, *alone, *features} - {"dawn_release"} | ELSEWHERE.keys() == METHODS.keys()
    for place in ELSEWHERE.values():
        file, test = place.split("::")
        assert re.search(rf"^def {test}\(", (Path(__file__).parent / file).read_text(), re.MULTILINE), place


@on_every_shape(*WHOLE)
def test_whole_forwards(family, shape, name):
    for spent in forwards_of(family, shape, name):
        assert spent.kind == "full" and spent.rows == spent.prompt + shape[0]
        assert (spent.computed == FAMILIES[family].config.layers).all()


@on_every_shape(*BLOCKS)
def test_block_caches(family, shape, name):
    """N at entries; in steps the block, which AdaBlock ends where its tokens do, or everything from the block on."""
    extra = FAMILIES[family].shift * (name not in ("dual_entry", "prefix_instead"))
    gen_length, size, seen = shape[0], 0, set()
    forwards = list(forwards_of(family, shape, name))
    for number, spent in enumerate(forwards):
        seen.add(spent.kind)
        if spent.kind == "entry":
            assert spent.rows == spent.prompt + gen_length
            start, after = int(np.argmax(spent.masked)), number + 1
            while after < len(forwards) and forwards[after].kind == "step":
                after += 1
            size = shape[1]
            if name == "adablock_dual":  # what was committed until the next entry
                last = after < len(forwards) and forwards[after].number > 0
                left = forwards[after].masked if last else np.zeros(gen_length, bool)
                size = (int(np.argmax(left)) if left.any() else gen_length) - start
        else:
            assert spent.rows == (gen_length - start if name.startswith("prefix") else size) + extra
    assert seen == {"entry", "step"}


@on_every_shape("polestar", "polestar_release")
def test_polestar(family, shape, name):
    """Window: two blocks before the block's rows, one after it; a refresh computes the block in every layer."""
    model, seen, (gen_length, size) = FAMILIES[family], set(), shape
    layers, shift = model.config.layers, model.shift
    for prompt, _, _, number, kind, rows, computed, *_ in forwards_of(family, shape, name):
        seen.add(kind)
        first = prompt + number * size
        start, stop = first - shift, first + size
        before, after = max(start - 2 * size, 0), min(stop + size, prompt + gen_length)
        block, window = size + shift, (start - before) + (after - stop)
        outside = np.concatenate([computed[before:start], computed[stop:after]])
        expected = {
            "step": block,
            "refresh": block + outside.sum() / layers,
            "window entry": block + window,
            "full entry": prompt + gen_length,
        }
        np.testing.assert_allclose(rows, expected[kind], rtol=1e-6)
        assert (computed[start:stop] == layers).all()
        assert kind == "full entry" or not (computed[:before].any() or computed[after:].any())
    assert seen == set(decoder(family, name, *own(shape)).kinds)


@on_every_shape("slowfast")
def test_slowfast(family, shape, name):
    """A cut forward runs everything up to the end of its stretch, which is finished before the next whole one."""
    cut, end = 0, 0
    for spent in forwards_of(family, shape, name):
        prompt, masked = spent.prompt, spent.masked
        if spent.rows == prompt + shape[0]:
            assert not end or spent.number == 0 or not masked[:end].any()
            end = 0
            continue
        cut += 1
        assert end in (0, int(spent.rows) - prompt)
        end = int(spent.rows) - prompt
        assert (spent.computed[: prompt + end] > 0).all() and not spent.computed[prompt + end :].any()
        assert end <= (spent.block + 1) * shape[1] and not spent.committed[end:].any()
    assert cut > 0


@on_every_shape("dkv_cache_greedy")
def test_dkv_cache_greedy(family, shape, name):
    """Last commits, this forward's, two masks near each of these, and the rows that predict these."""
    shift, partial, last = FAMILIES[family].shift, 0, set()
    for spent in forwards_of(family, shape, name):
        now = set(np.flatnonzero(spent.committed))
        assert (spent.kind == "step") == (spent.phase % 3 != 0)
        if spent.kind == "step":
            partial += 1
            wanted = now | last
            for slot in sorted(now):
                free = [mask for mask in np.flatnonzero(spent.masked) if mask not in wanted]
                wanted |= set(sorted(free, key=lambda mask, slot=slot: (abs(mask - slot), mask))[:2])
            wanted |= {slot - shift for slot in now}
            assert spent.rows == len(wanted)
            assert set(np.flatnonzero(spent.computed) - spent.prompt) == wanted
        else:
            assert spent.rows == spent.prompt + shape[0]
        last = now
    assert partial > 8


@on_every_shape("dkv_cache")
def test_dkv_cache(family, shape, name):
    """What was masked before the last forward; everything in a block's first two forwards, and in every third one."""
    for spent in forwards_of(family, shape, name):
        whole = spent.phase < 2 or spent.phase % 3 == 0
        assert (spent.kind != "step") == whole
        assert spent.rows == (spent.prompt + shape[0] if whole else spent.earlier.sum())


@on_every_shape("dllm_cache", "dynamic_dllm_dynamics")
def test_cached_features(family, shape, name):
    """Layer 0 is always complete; the others run what the kind of forward asks for."""
    model, seen, gen_length = FAMILIES[family], set(), shape[0]
    chosen = {"dllm_cache": gen_length // 4, "dynamic_dllm_dynamics": 3 + 2}[name]
    for spent in forwards_of(family, shape, name):
        seen.add(spent.kind)
        assert spent.kind == KINDS[(spent.number % 5 == 0) + 2 * (spent.number % 3 == 0)]
        length, later = spent.prompt + gen_length, model.config.layers - 1
        in_layer = {
            "step": chosen,
            "prompt": chosen + spent.prompt - model.shift,
            "response": gen_length + model.shift,
            "full": length,
        }
        np.testing.assert_allclose(spent.rows, (length + later * in_layer[spent.kind]) / (later + 1), rtol=1e-6)
    assert seen == set(KINDS)


@on_every_shape("sparse_dllm", "sparse_dllm_entry")
def test_sparse_dllm(family, shape, name):
    """Everything in a block's first two forwards, then the block's rows."""
    shift = FAMILIES[family].shift * (name == "sparse_dllm")
    for spent in forwards_of(family, shape, name):
        assert spent.kind == ("whole" if spent.phase < 2 else "step")
        assert spent.rows == (spent.prompt + shape[0] if spent.phase < 2 else shape[1] + shift)


@on_every_shape("wino")
def test_wino(family, shape, name):
    for spent in forwards_of(family, shape, name):
        assert spent.kind == "full" and spent.rows == spent.prompt + sum(shape)


@on_every_shape("freecache")
def test_freecache(family, shape, name):
    """Everything at first, and then from the block on."""
    for spent in forwards_of(family, shape, name):
        left = shape[0] - spent.block * shape[1] + FAMILIES[family].shift
        assert spent.rows == (left if spent.number else spent.prompt + shape[0])


@on_every_shape("dpad", "dpad_prefix")
def test_dpad(family, shape, name):
    """Everything up to the block's end, and what is kept after it; after an entry from the block on."""
    (gen_length, size), shift, fewest, in_block = shape, FAMILIES[family].shift, 99, 0
    for spent in forwards_of(family, shape, name):
        after = gen_length - (spent.block + 1) * size
        stop = spent.prompt + gen_length - after
        if name == "dpad":  # how many are kept is drawn, once for every block
            assert spent.kind == "full" and stop <= spent.rows <= stop + after
            assert spent.phase == 0 or spent.rows == in_block
            in_block, fewest = spent.rows, min(fewest, spent.rows - stop - after)
        else:  # 3 of a window of 7, if there are so many left
            assert spent.rows == min(3, after) + (stop if spent.kind == "entry" else size + shift)
    assert name != "dpad" or fewest < 0
