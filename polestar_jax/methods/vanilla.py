"""LLaDA's own sampler: a fixed number of commits per forward, no cache (arXiv 2502.09992, algorithm 5)."""

from polestar_jax.card import Card
from polestar_jax.commit import Quota
from polestar_jax.head import Greedy, Gumbel
from polestar_jax.no_cache import NoCache
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Method

CARD = Card(
    title="LLaDA's sampler",
    paper="2502.09992",
    reuses="nothing",
    refreshes="everything, in every forward",
    commits="a fixed number per forward, the most confident or any",
    state="masks of the block at its entry",
    rows={"full": "N"},
    extra="none",
    twin="none",
)


def vanilla(
    *,
    steps: int | None = None,
    block_length: int = 32,
    remasking: str = "low_confidence",
    temperature: float = 0.0,
    guidance: float | None = None,
) -> Method:
    """LLaDA's fixed schedule.

    Args:
      steps: forwards for the whole generation; None commits one token per forward.
      block_length: S.
      remasking: "low_confidence" keeps the most confident predictions, "random" random ones.
      temperature: of the Gumbel noise; 0 is greedy.
      guidance: scale of classifier-free guidance, or None.
    """
    return Method(
        name="vanilla",
        cache=NoCache(),
        rule=Quota(steps=steps, remasking=remasking),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Gumbel(temperature) if temperature else Greedy(),
        guidance=guidance,
    )
