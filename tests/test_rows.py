"""The rows that cards promise, on prompts of four lengths, recounted from what the log says was committed.

`ELSEWHERE` says where the rows of the other methods are tested.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from methods_table import BLOCK_LENGTH, EVERYONE, FAMILIES, GEN_LENGTH, LENGTHS, RAGGED, decode_once, decoder

from polestar_jax.methods import METHODS

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
WHOLE = (
    *("vanilla", "parallel", "entropy_bound", "dream", "prophet", "hierarchy", "localleap", "dimple"),
    *("klass", "dawn_release", "adablock"),
)
BLOCKS = ("dual", "prefix", "klass_dual", "dawn_dual", "adablock_dual")
ELSEWHERE = {
    "d2cache": "test_d2cache.py::test_rows_follow_the_formula",
    "dkv_cache": "test_contract_caches.py::test_rows_of_partial_forwards",
    "dllm_cache": "test_contract_caches.py::test_rows_of_cached_features",
    "dpad": "test_parallel_methods.py::test_rows_of_dpad",
    "dynamic_dllm": "test_contract_caches.py::test_rows_of_cached_features",
    "elastic_cache": "test_elastic_cache.py::test_decode_equals_the_one_by_hand",
    "entropy_cache": "test_entropy_cache.py::test_rows_follow_the_formula",
    "freecache": "test_parallel_methods.py::test_rows",
    "sparse_dllm": "test_contract_caches.py::test_rows_of_partial_forwards",
    "wino": "test_parallel_methods.py::test_rows",
}


def forwards_of(family: str, name: str):
    """Of every forward of every row: prompt length, kind, rows, layers by slot, and the generated masks before it.

    Slots count from the prompt's first token.
    """
    output, kinds = decode_once(family, name, EVERYONE, RAGGED), decoder(family, name).kinds
    for row, prompt in enumerate(LENGTHS):
        masked = np.ones(GEN_LENGTH, bool)
        for forward in range(output.forwards[row]):
            log, token = output.log, output.log.token[row, forward]
            computed = log.computed[row, forward, RAGGED - prompt :]
            yield prompt, kinds[log.kind[row, forward]], log.rows[row, forward], computed, masked.copy(), token >= 0
            masked &= token < 0


def test_every_method_is_listed_once():
    here = {"fast_dllm": "dual", "dawn": "dawn_release", "slowfast": "", "dkv_cache_greedy": "", "polestar": ""}
    assert {*WHOLE, *here} - {"dawn_release"} | ELSEWHERE.keys() == METHODS.keys()
    for place in ELSEWHERE.values():
        file, test = place.split("::")
        assert re.search(rf"^def {test}\(", (Path(__file__).parent / file).read_text(), re.MULTILINE), place


@EVERY_FAMILY
@pytest.mark.parametrize("name", WHOLE)
def test_whole_forwards(family, name):
    for prompt, kind, rows, computed, _, _ in forwards_of(family, name):
        assert kind == "full" and rows == prompt + GEN_LENGTH
        assert (computed == FAMILIES[family].config.layers).all()


@EVERY_FAMILY
@pytest.mark.parametrize("name", BLOCKS)
def test_block_caches(family, name):
    """N at entries; in steps the block, which AdaBlock ends where its tokens do, or everything from the block on."""
    shift, size, seen = FAMILIES[family].shift, 0, set()
    forwards = list(forwards_of(family, name))
    for number, (prompt, kind, rows, _, masked, _) in enumerate(forwards):
        seen.add(kind)
        if kind == "entry":
            assert rows == prompt + GEN_LENGTH
            start, after = int(np.argmax(masked)), number + 1
            while after < len(forwards) and forwards[after][1] == "step":
                after += 1
            size = BLOCK_LENGTH
            if name == "adablock_dual":  # what was committed until the next entry
                last = after < len(forwards) and not forwards[after][4].all()
                left = forwards[after][4] if last else np.zeros(GEN_LENGTH, bool)
                size = (int(np.argmax(left)) if left.any() else GEN_LENGTH) - start
        else:
            assert rows == (GEN_LENGTH - start if name == "prefix" else size) + shift
    assert seen == {"entry", "step"}


@EVERY_FAMILY
@pytest.mark.parametrize("name", ["polestar", "polestar_release"])
def test_polestar(family, name):
    """Window: two blocks before the block's rows, one after it; a refresh computes the block in every layer."""
    model, seen = FAMILIES[family], set()
    layers, shift = model.config.layers, model.shift
    for prompt, kind, rows, computed, masked, _ in forwards_of(family, name):
        seen.add(kind)
        first = prompt + int(np.argmax(masked)) // BLOCK_LENGTH * BLOCK_LENGTH
        start, stop = first - shift, first + BLOCK_LENGTH
        before, after = max(start - 2 * BLOCK_LENGTH, 0), min(stop + BLOCK_LENGTH, prompt + GEN_LENGTH)
        block, window = BLOCK_LENGTH + shift, (start - before) + (after - stop)
        outside = np.concatenate([computed[before:start], computed[stop:after]])
        expected = {
            "step": block,
            "refresh": block + outside.sum() / layers,
            "window entry": block + window,
            "full entry": prompt + GEN_LENGTH,
        }
        np.testing.assert_allclose(rows, expected[kind], rtol=1e-6)
        assert (computed[start:stop] == layers).all()
        assert kind == "full entry" or not (computed[:before].any() or computed[after:].any())
    assert seen == set(decoder(family, name).kinds)


@EVERY_FAMILY
def test_slowfast(family):
    """A cut forward runs everything up to the end of its stretch, which is finished before the next whole one."""
    cut, end = 0, 0
    for prompt, _, rows, computed, masked, committed in forwards_of(family, "slowfast"):
        if rows == prompt + GEN_LENGTH:
            assert not end or masked.all() or not masked[:end].any()
            end = 0
            continue
        cut += 1
        assert end in (0, int(rows) - prompt)
        end = int(rows) - prompt
        assert (computed[: prompt + end] > 0).all() and not computed[prompt + end :].any()
        assert end <= (int(np.argmax(masked)) // BLOCK_LENGTH + 1) * BLOCK_LENGTH and not committed[end:].any()
    assert cut > 0


@EVERY_FAMILY
def test_dkv_cache_greedy(family):
    """Last commits, this forward's, two masks near each of these, and the rows that predict these."""
    shift, partial, last = FAMILIES[family].shift, 0, set()
    for prompt, kind, rows, computed, masked, committed in forwards_of(family, "dkv_cache_greedy"):
        now = set(np.flatnonzero(committed))
        if kind == "step":
            partial += 1
            wanted = now | last
            for slot in sorted(now):
                free = [mask for mask in np.flatnonzero(masked) if mask not in wanted]
                wanted |= set(sorted(free, key=lambda mask, slot=slot: (abs(mask - slot), mask))[:2])
            wanted |= {slot - shift for slot in now}
            assert rows == len(wanted)
            assert set(np.flatnonzero(computed) - prompt) == wanted
        else:
            assert rows == prompt + GEN_LENGTH
        last = now
    assert partial > 8
