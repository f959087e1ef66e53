"""The entropy-bounded sampler (arXiv 2505.24857): commits the surest as long as their joint uncertainty is bounded."""

from polestar_jax.card import Card
from polestar_jax.commit import EntropyBound
from polestar_jax.head import Greedy
from polestar_jax.no_cache import NoCache
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Method

CARD = Card(
    title="EB-Sampler",
    paper="2505.24857",
    reuses="nothing",
    refreshes="everything, in every forward",
    commits="the most confident, as many as keep the sum of their entropies less the largest one within `gamma`",
    state="none",
    rows={"full": "N"},
    extra="none",
    twin="`gamma` below 0 is one token per forward, `vanilla`",
)


def entropy_bound(*, gamma: float = 0.1, release: bool = False, block_length: int = 32) -> Method:
    """The entropy-bounded sampler, with confidence as its order.

    Args:
      gamma: bound in nats; the paper's figures have values from 0.001 to 1.
      release: the habit of d2Cache's port, which subtracts a candidate's own entropy instead of the largest so far.
      block_length: S.
    """
    return Method(
        name="entropy_bound",
        cache=NoCache(),
        rule=EntropyBound(gamma, release=release),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )
