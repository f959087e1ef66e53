"""Every recorded run of the comparison methods is replayed by a test, or named as one that is not."""

import inspect

import test_parity_caches
import test_parity_d2cache
import test_parity_parallel
import test_parity_rules
from baselines import NOT_REPLAYED, REPLAYED, arrays, matching

MODULES = (test_parity_caches, test_parity_d2cache, test_parity_parallel, test_parity_rules)


def test_no_recorded_run_is_forgotten():
    runs, left_out = set(matching("*")), set(matching(*NOT_REPLAYED))
    assert len(runs) == 115 and len(left_out) == 7
    assert runs - left_out == REPLAYED.keys()


def test_who_replays_compares():
    """Tokens, forwards, rows, commits, revocations and the last logits, which every recording has."""
    for (folder, name), test in REPLAYED.items():
        assert inspect.getmodule(test) in MODULES
        assert "assert_as_recorded(folder, name, repl" in inspect.getsource(test), test.__name__
        assert f"{name}/last_logits" in arrays(folder), (folder, name)


def test_what_is_left_out_is_explained(golden):
    readme = (golden / "README.md").read_text()
    for pattern in NOT_REPLAYED:
        folder, name = pattern.split("/")
        assert matching(pattern) and f"`{folder}`" in readme and f"`{name}`" in readme, pattern
