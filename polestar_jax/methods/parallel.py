"""Confidence-based parallel decoding without a cache (Fast-dLLM, arXiv 2505.22618): the paper's "Baseline+Parallel"."""

from polestar_jax.commit import Factor, Threshold
from polestar_jax.head import Greedy
from polestar_jax.methods.no_cache import NoCache
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Method


def confidence_rule(threshold: float | None, factor: float | None) -> Threshold | Factor:
    """The rule that one of the two numbers asks for; a threshold of 0.9 if neither is given."""
    if threshold is not None and factor is not None:
        raise ValueError(f"threshold={threshold} and factor={factor} exclude each other; give one")
    return Threshold(0.9 if threshold is None else threshold) if factor is None else Factor(factor)


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
