"""The rows that cards of KLASS, DAWN, AdaBlock and the entropy-bounded sampler promise, on prompts of four lengths."""

import numpy as np
import pytest
from methods_table import BLOCK_LENGTH, EVERYONE, GEN_LENGTH, LENGTHS, RAGGED, decode_once, decoder

NAMES = ("klass", "klass_dual", "dawn_release", "dawn_dual", "adablock", "adablock_dual", "entropy_bound")


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_card(name):
    """N in forwards over the whole canvas; in steps of `dual` the block's, which AdaBlock ends where its tokens do."""
    output = decode_once("llada", name, EVERYONE, RAGGED)
    kinds = decoder("llada", name).kinds
    for row, length in enumerate(LENGTHS):
        whole = length + GEN_LENGTH
        kind = [kinds[each] for each in output.log.kind[row, : output.forwards[row]]]
        rows = output.log.rows[row, : output.forwards[row]]
        entries = [i for i, each in enumerate(kind) if each != "step"]
        np.testing.assert_array_equal(rows[entries], whole)
        for entry, after in zip(entries, [*entries[1:], len(kind)], strict=True):
            committed = (output.log.token[row, entry:after] >= 0).any(axis=0)
            block = np.flatnonzero(committed)
            size = BLOCK_LENGTH if name != "adablock_dual" else block[-1] - block[0] + 1
            np.testing.assert_array_equal(rows[entry + 1 : after], size)
    assert ("step" in kinds) == name.endswith("dual")
