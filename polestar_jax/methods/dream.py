"""Dream's own sampler (arXiv 2508.15487): a schedule of times over the whole generation, no blocks, no cache."""

from typing import Literal

from polestar_jax.card import Card
from polestar_jax.filtered import Filtered
from polestar_jax.no_cache import NoCache
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.timesteps import BudgetedThreshold, Order, Timesteps
from polestar_jax.types import Method

CARD = Card(
    title="Dream's sampler",
    paper="2508.15487",
    reuses="nothing",
    refreshes="everything, in every forward",
    commits="a scheduled number per forward, by confidence, margin, entropy or at random; or what is confident, within"
    " the pace of the schedule",
    state="masks of the block at its entry",
    rows={"full": "N"},
    extra="none",
    twin="`confidence_threshold` with `steps` 1: `parallel` over one block",
)

_ORDERS: dict[str, Order] = {
    "origin": "random",
    "maskgit_plus": "confidence",
    "topk_margin": "margin",
    "entropy": "entropy",
}


def dream(
    *,
    alg: Literal["origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold"] = "entropy",
    steps: int | None = None,
    eps: float = 1e-3,
    threshold: float = 0.9,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    alg_temp: float | None = None,
) -> Method:
    """Dream's sampler, under the names of its public code; one block, whatever the length of other methods' blocks.

    Args:
      alg: which positions a forward commits: any ("origin"), the most confident ("maskgit_plus"), those with the widest
        margin between the two likeliest tokens ("topk_margin"), those of the least entropy ("entropy"), or those with
        confidence >= `threshold`, no faster than the steps allow ("confidence_threshold", Fast-dLLM's addition).
      steps: forwards for the whole generation; None is one per token.
      eps: the last time of the schedule.
      threshold: of "confidence_threshold".
      temperature: of the tokens; 0 is greedy.
      top_p, top_k: keep the likeliest tokens only.
      alg_temp: temperature of the choice of positions; None or 0 is the first of the order.

    Raises:
      ValueError: if `alg` is unknown, or chooses no order that `alg_temp` could soften.
    """
    if alg != "confidence_threshold" and alg not in _ORDERS:
        raise ValueError(f"alg={alg!r} must be one of {', '.join(_ORDERS)}, confidence_threshold")
    if alg_temp and alg in ("origin", "confidence_threshold"):
        raise ValueError(f"alg_temp={alg_temp} has no meaning for alg={alg!r}; leave it out")
    if alg == "confidence_threshold":
        rule = BudgetedThreshold(threshold, steps=steps)
    else:
        rule = Timesteps(steps=steps, eps=eps, order=_ORDERS[alg], noise=alg_temp or None)
    return Method(
        name="dream",
        cache=NoCache(),
        rule=rule,
        schedule=SemiAutoregressive(block_length=None),
        sampler=Filtered(temperature or None, top_p, top_k),
    )
