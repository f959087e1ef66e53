"""Every rule decides about the last block as about one in the middle, which others test against plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_selection_rules import ALL_MASKED, NUMBERS, ONE_MASKED, SPEC, B, G, N, P, S, V, commits_of

from polestar_jax.commit import EntropyBound, Factor, FirstTokenAtEntry, PolestarCommit, Quota, Threshold
from polestar_jax.dependency import Dependency
from polestar_jax.methods.dimple import Confident
from polestar_jax.methods.hierarchy import Hierarchy
from polestar_jax.methods.localleap import LocalLeap
from polestar_jax.methods.prophet import EarlyExit
from polestar_jax.methods.wino import Wino
from polestar_jax.prediction_dynamics import PredictionDynamics
from polestar_jax.stability import Stability
from polestar_jax.timesteps import BudgetedThreshold, Timesteps

RULES = {
    "threshold": Threshold(0.75),
    "factor": Factor(1.0),
    "quota": Quota(steps=6),
    "first_token": FirstTokenAtEntry(Threshold(0.75)),
    "timesteps": Timesteps(steps=6, order="confidence"),
    "budgeted": BudgetedThreshold(0.25, steps=6),
    "entropy_bound": EntropyBound(0.5),
    "polestar": PolestarCommit(tau=0.75),
    "klass": Stability(tau_c=0.375, eps_kl=0.01),
    "dawn": Dependency(**NUMBERS),
    "hierarchy": Hierarchy(0.75, 0.25),
    "localleap": LocalLeap(0.75, 0.5, 2),
    "dimple": Confident(0.75),
    "wino": Wino(0.5, 0.75),
    "dynamics": PredictionDynamics(0.6, 0.2, 0.3, "position"),
}
BLOCKS = G // S
CONFIDENCES = (
    np.zeros((B, S), np.float32),
    np.ones((B, S), np.float32),
    np.array([[0.5, 1, 0.25, 0.875], [0.375, 0.75, 0.75, 0.125]], np.float32),
)


def everywhere(block):
    """`[B, S, ...]` of one block, the same for every block of the generation."""
    return jnp.asarray(np.concatenate([block] * BLOCKS, axis=1))


def signals() -> dict:
    """Signals that look the same from every block: attention stays inside it."""
    random = np.random.default_rng(0)
    attention, inside = np.zeros((B, G, N), np.float32), random.choice(4, (B, S, S)) / 8
    for first in range(0, G, S):
        attention[:, first : first + S, P + first : P + first + S] = inside
    received = np.concatenate([np.zeros((B, P)), *[random.choice(4, (B, S)) / 16] * BLOCKS], axis=1)
    return {
        "attention": jnp.asarray(attention),
        "attention_received": jnp.asarray(received, jnp.float32),
        "entropy": everywhere(random.choice(4, (B, S)).astype(np.float32) / 4),
        "drift": everywhere(random.choice(4, (B, S)).astype(np.float32)),
        "suffix": jnp.zeros((B, G), bool),
        "shadow": jnp.ones((B, G), jnp.float32),
    }


def reasons_of(rule, index: int, masked, confidence, phase: int, gap: float = 0.0) -> np.ndarray:
    """Reasons `[B, S]` in forward `phase` of a block, after forwards that changed nothing."""
    logits = everywhere(np.random.default_rng(1).normal(size=(B, S, V)).astype(np.float32))
    state, extra = rule.init(SPEC), signals() | {"gap": jnp.full((B, G), gap)}
    for now in range(phase + 1):
        given = (masked, confidence) if now == phase else (ALL_MASKED, CONFIDENCES[0])
        state, reason, _ = commits_of(
            rule, *given, index=index, state=state, logits=logits, extra=extra, phase=(now, now)
        )
    return reason


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_last_block_is_decided_like_any_other(rule):
    seen = []
    for masked in (ALL_MASKED, ONE_MASKED, np.array([[1, 0, 1, 1], [0, 1, 1, 0]], bool)):
        for confidence in CONFIDENCES:
            for phase in (0, 2):
                last = reasons_of(rule, BLOCKS - 1, masked, confidence, phase)
                np.testing.assert_array_equal(last, reasons_of(rule, 1, masked, confidence, phase))
                seen.append(last)
    assert len(np.unique(np.concatenate(seen))) > 1 and not all((last > 0).all() for last in seen)


@pytest.mark.parametrize("masked", [ALL_MASKED, ONE_MASKED])
def test_prophet_exits_in_the_last_block(masked):
    """What is left is this block alone, in a forward that counts as late."""
    rule = EarlyExit(Quota(), early=9.0, mid=9.0, late=2.5)
    reasons = lambda gap: reasons_of(rule, BLOCKS - 1, masked, CONFIDENCES[2], 1, gap)
    np.testing.assert_array_equal(reasons(3.0) > 0, masked)
    np.testing.assert_array_equal((reasons(2.0) > 0).sum(axis=1), 1)
