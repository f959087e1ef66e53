"""Confidence-based parallel decoding without a cache (Fast-dLLM, arXiv 2505.22618): the paper's "Baseline+Parallel"."""

from polestar_jax.card import Card
from polestar_jax.commit import confidence_rule
from polestar_jax.head import Greedy
from polestar_jax.no_cache import NoCache
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Method

CARD = Card(
    title="Parallel (Fast-dLLM without a cache)",
    paper="2505.22618",
    reuses="nothing",
    refreshes="everything, in every forward",
    commits="confidence at least `threshold`, and the most confident; or the factor rule",
    state="none",
    rows={"full": "N"},
    extra="none",
    twin="is the twin of the caches",
)


def parallel(
    *,
    threshold: float | None = None,
    factor: float | None = None,
    guidance: float | None = None,
    block_length: int = 32,
) -> Method:
    """Parallel decoding that recomputes everything in every forward.

    Args:
      threshold: commit what is at least this confident; 0.9 unless `factor` is given.
      factor: Fast-dLLM's factor rule instead.
      guidance: scale of classifier-free guidance, or None.
      block_length: S.
    """
    return Method(
        name="parallel",
        cache=NoCache(),
        rule=confidence_rule(threshold, factor),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
        guidance=guidance,
    )
