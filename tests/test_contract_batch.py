"""A row of a ragged batch decodes as it does alone: company, place and padding have no influence (contract 1)."""

import numpy as np
from methods_table import ALONE, EVERYONE, GEN_LENGTH, LENGTHS, RAGGED, SAME_LENGTH, case_fixture, decode_once

case = case_fixture()


def assert_same_row(ours, row: int, theirs, other: int, length: int) -> None:
    """Compares a row of an output with a row of another, whose paddings may differ.

    What the program executed depends on the batch by definition. Drift is a small difference of large sums, whose order
    XLA chooses by shape; everything that is decided is compared exactly.
    """
    for field in ("tokens", "filled", "forwards"):
        np.testing.assert_array_equal(getattr(ours, field)[row], getattr(theirs, field)[other], err_msg=field)
    for field in ("kind", "rows", "token", "reason"):
        np.testing.assert_array_equal(getattr(ours.log, field)[row], getattr(theirs.log, field)[other], err_msg=field)
    np.testing.assert_allclose(ours.log.drift[row], theirs.log.drift[other], atol=1e-4)
    own = length + GEN_LENGTH
    for log, at in ((ours.log, row), (theirs.log, other)):
        assert not log.computed[at, :, :-own].any(), "a pad was computed"
    np.testing.assert_array_equal(ours.log.computed[row, :, -own:], theirs.log.computed[other, :, -own:])


def test_ragged_batch_equals_rows_alone(case):
    family, name = case
    batch = decode_once(family, name, EVERYONE, RAGGED)
    assert len(set(batch.forwards)) > 1 or name.startswith("vanilla") or name in SAME_LENGTH
    for row, length in enumerate(LENGTHS):
        alone = decode_once(family, name, (row,), ALONE)
        assert_same_row(batch, row, alone, 0, length)


def test_place_in_the_batch_and_pad_ids_have_no_influence(case):
    family, name = case
    batch = decode_once(family, name, EVERYONE, RAGGED)
    order = (2, 0, 3, 1)
    shuffled = decode_once(family, name, order, RAGGED, garbage=1)
    for place, row in enumerate(order):
        assert_same_row(batch, row, shuffled, place, LENGTHS[row])


def test_company_has_no_influence(case):
    """A row among copies of itself, none of which ever waits for another."""
    family, name = case
    batch = decode_once(family, name, EVERYONE, RAGGED)
    copies = decode_once(family, name, (1, 1, 1, 1), RAGGED)
    for place in range(4):
        assert_same_row(batch, 1, copies, place, LENGTHS[1])
