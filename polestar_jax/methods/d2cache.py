"""d2Cache (arXiv 2509.23094): rows chosen anew for every forward, by certainty and by attention."""

from typing import Any

from polestar_jax.card import Card
from polestar_jax.certainty import CertaintyPrior
from polestar_jax.chosen_rows import D2Cache
from polestar_jax.commit import Quota, confidence_rule
from polestar_jax.head import Greedy
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Method

CARD = Card(
    title="d2Cache",
    paper="2509.23094",
    reuses="keys and values of every row outside this forward's row set, however old",
    refreshes="the `current_k` masks of highest confidence x certainty density from the block on, what was committed"
    " last, and a nucleus of `rollout_p` of the attention rollout among all others; everything once, at the start",
    commits="one token per forward, the highest confidence x certainty density of the whole generation; or a threshold"
    " or the factor rule, block by block",
    state="keys and values; last confidence of every generated position; the next row set",
    rows={"full": "N", "rows": "min(current_k, masks) + committed last + nucleus + gaps, at most `capacity`"},
    extra="attention of the rows, mean over heads, and one vector-matrix product per layer with it",
    twin="`parallel` or `vanilla`: current_k >= G, rollout_p = 1, capacity >= N",
)

# Two slips of the public code (a write to a copy; a caller's mask narrowed in place), and its habits with shifted
# logits.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "release": {"first_confidence": 1, "narrowed_block": 1, "shifted_habits": 1},
}


def d2cache(
    preset: str = "paper",
    *,
    threshold: float | None = None,
    factor: float | None = None,
    prior: float | None = None,
    current_k: float = 32,
    rollout_p: float = 0.1,
    sigma: float = 10.0,
    inflate_w: float = 0,
    capacity: int = 128,
    block_length: int | None = None,
) -> Method:
    """d2Cache, with its own one token per forward (section 4.3), or with a parallel rule.

    Args:
      preset: "paper", or "release": the public code, faults included (`D2Cache` names them).
      threshold, factor: the parallel rule, as in `parallel`; without either, one token per forward.
      prior: the rule sees confidence times certainty density of this sigma; 0 is no prior, None is 10 without a
        parallel rule and no prior with one.
      current_k, rollout_p, sigma, inflate_w, capacity: see `D2Cache`.
      block_length: S; None is the whole generation.

    Raises:
      ValueError: naming an unknown preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} must be one of {', '.join(PRESETS)}")
    single = threshold is None and factor is None
    rule = Quota() if single else confidence_rule(threshold, factor)
    prior = (10.0 if single else 0.0) if prior is None else prior
    return Method(
        name="d2cache" if preset == "paper" else f"d2cache:{preset}",
        cache=D2Cache(
            current_k=current_k,
            rollout_p=rollout_p,
            sigma=sigma,
            inflate_w=inflate_w,
            capacity=capacity,
            **PRESETS[preset],
        ),
        rule=CertaintyPrior(rule, prior) if prior else rule,
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )
