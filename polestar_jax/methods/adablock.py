"""AdaBlock-dLLM (arXiv 2509.26432): Fast-dLLM with blocks that end where a sentence or a line does."""

from typing import Any

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
    rows={
        "full": "N",
        "entry": "N",
        "step": "stop - start (dual), N - start (prefix); one more where logits are shifted and `first_token` is exact",
    },
    extra="the rows that are run are those of the largest block, max(S, G / 4)",
    twin="`delimiter_threshold=inf` is `parallel`, or `fast_dllm` with the same cache",
)

LLADA_NEWLINE = (198,)
DREAM_NEWLINES = (
    *(198, 271, 280, 319, 340, 382, 401, 532, 624, 630, 692, 698, 921, 1248, 1837, 1939),
    *(2219, 2533, 3276, 3876, 4894, 5267, 14750, 68327),
)
"""Tokens that end a line: the delimiters of the authors' public code."""


PRESETS: dict[str, dict[str, Any]] = {
    "llada": {"delimiter_threshold": 0.3, "delimiters": LLADA_NEWLINE},
    "dream": {"delimiter_threshold": 0.5, "delimiters": DREAM_NEWLINES},
}
"""Fields by preset, as in the authors' public code, which the paper agrees with."""


def adablock(
    preset: str = "llada",
    *,
    cache: str = "none",
    threshold: float = 0.9,
    delimiter_threshold: float | None = None,
    delimiters: tuple[int, ...] | None = None,
    first_token: FirstToken = "exact",
    block_length: int = 32,
) -> Method:
    """AdaBlock-dLLM.

    Args:
      preset: "llada" or "dream".
      cache: "none", or Fast-dLLM's "dual" or "prefix".
      threshold: of the confidence, as in `parallel`.
      delimiter_threshold: tau_D; None is the preset's.
      delimiters: ids of tokens that end a sentence or a line; None is the preset's, any other model needs its own
        (`polestar_jax.tokenizer.Tokenizer.delimiters`).
      first_token: as in `fast_dllm`; the authors' code on Dream has "entry".
      block_length: B_0, the length of a block without a delimiter.

    Raises:
      ValueError: naming an unknown preset; or if `first_token` is not "exact" without a cache.
    """
    if first_token != "exact" and cache == "none":
        raise ValueError(f"first_token={first_token!r} is a habit of cached forwards; without a cache leave it 'exact'")
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} must be one of {', '.join(PRESETS)}")
    given = {"delimiter_threshold": delimiter_threshold, "delimiters": delimiters}
    chosen = PRESETS[preset] | {name: value for name, value in given.items() if value is not None}
    rule = Threshold(threshold)
    return Method(
        name="adablock",
        cache=NoCache() if cache == "none" else BlockCache(mode=cache, first_token=first_token),
        rule=FirstTokenAtEntry(rule) if first_token == "entry" else rule,
        schedule=AdaptiveBlocks(base_length=block_length, **chosen),
        sampler=Greedy(),
    )
