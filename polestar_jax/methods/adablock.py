"""AdaBlock-dLLM (arXiv 2509.26432): Fast-dLLM with blocks that end where a sentence or a line does."""

from polestar_jax.adaptive_blocks import AdaptiveBlocks
from polestar_jax.block_cache import BlockCache, FirstToken
from polestar_jax.card import Card
from polestar_jax.commit import FirstTokenAtEntry, Threshold
from polestar_jax.head import Greedy
from polestar_jax.no_cache import NoCache
from polestar_jax.types import Method

CARD = Card(
    title="AdaBlock-dLLM",
    paper="2509.26432",
    reuses="nothing; with `cache`, as Fast-dLLM",
    refreshes="everything, at every block entry; without a cache, in every forward",
    commits="confidence at least `threshold`, and the most confident",
    state="start and end of the block; with `cache`, keys and values",
    rows={"full": "N", "entry": "N", "step": "stop - start (dual), N - start (prefix)"},
    extra="the rows that are run are those of the largest block, max(S, G / 4)",
    twin="`delimiter_threshold=inf` is `parallel`, or `fast_dllm` with the same cache",
)

LLADA_NEWLINE = (198,)
DREAM_NEWLINES = (
    *(198, 271, 280, 319, 340, 382, 401, 532, 624, 630, 692, 698, 921, 1248, 1837, 1939),
    *(2219, 2533, 3276, 3876, 4894, 5267, 14750, 68327),
)
"""Tokens that end a line: the delimiters of the authors' public code."""


def adablock(
    *,
    cache: str = "none",
    threshold: float = 0.9,
    delimiter_threshold: float = 0.3,
    delimiters: tuple[int, ...] = LLADA_NEWLINE,
    first_token: FirstToken = "exact",
    block_length: int = 32,
) -> Method:
    """AdaBlock-dLLM.

    Args:
      cache: "none", or Fast-dLLM's "dual" or "prefix".
      threshold: of the confidence, as in `parallel`.
      delimiter_threshold: tau_D; the paper has 0.3 for LLaDA and 0.5 for Dream.
      delimiters: ids of tokens that end a sentence or a line; the default is LLaDA's newline, `DREAM_NEWLINES` are
        Dream's, any other model needs its own.
      first_token: as in `fast_dllm`; the authors' code on Dream has "entry".
      block_length: B_0, the length of a block without a delimiter.

    Raises:
      ValueError: if `first_token` is "entry" without a cache.
    """
    if first_token == "entry" and cache == "none":
        raise ValueError("first_token='entry' is a habit of cached forwards; without a cache leave it 'exact'")
    rule = Threshold(threshold)
    return Method(
        name="adablock",
        cache=NoCache() if cache == "none" else BlockCache(mode=cache, first_token=first_token),
        rule=FirstTokenAtEntry(rule) if first_token == "entry" else rule,
        schedule=AdaptiveBlocks(
            delimiter_threshold=delimiter_threshold, delimiters=delimiters, base_length=block_length
        ),
        sampler=Greedy(),
    )
