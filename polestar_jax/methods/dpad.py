"""DPad (arXiv 2508.14148): a block sees only some of the masks that follow it, fewer the farther they are."""

from polestar_jax.block_cache import BlockCache
from polestar_jax.card import Card
from polestar_jax.commit import Quota, confidence_rule
from polestar_jax.dropped_suffix import DroppedSuffix
from polestar_jax.early_stop import StopAtEos
from polestar_jax.head import Greedy
from polestar_jax.no_cache import NoCache
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Method

CARD = Card(
    title="DPad",
    paper="2508.14148",
    reuses="nothing; or keys and values before the block (prefix) or outside it (dual)",
    refreshes="everything that is kept, in every forward (none) or at every block entry",
    commits="as `fast_dllm`; with `stop_at_eos` a finished block that holds EOS fills the rest with EOS",
    state="kept positions of the suffix; keys and values (prefix, dual)",
    rows={
        "full": "stop + kept",
        "entry": "stop + kept",
        "step": "S (dual), S + kept (prefix); one more where logits are shifted",
    },
    extra="none",
    twin="`parallel` and `fast_dllm`, with the uniform draw and `preserved` and `window` at least G",
)


def dpad(
    *,
    cache: str = "none",
    draw: str = "gaussian",
    scale: float = 2.0,
    decay: float = 4.0,
    window: int = 256,
    preserved: int = 64,
    threshold: float | None = None,
    factor: float | None = None,
    steps: int | None = None,
    stop_at_eos: bool = False,
    block_length: int = 32,
) -> Method:
    """DPad over no cache, or over Fast-dLLM's.

    Args:
      cache: "none", "prefix" or "dual".
      draw, scale, decay, window, preserved: which positions of the suffix are kept, see `DroppedSuffix`. The original
        takes (decay, scale, window) = (4, 2, 256) for GSM8K and MATH, (3, 2.3, 512) for HumanEval, (3, 2.3, 128) for
        MBPP.
      threshold, factor, steps: the commit rule, as in `fast_dllm`.
      stop_at_eos: the original's early termination.
      block_length: S.
    """
    if steps is not None and (threshold is not None or factor is not None):
        raise ValueError(f"steps={steps} excludes threshold and factor; give one")
    rule = confidence_rule(threshold, factor) if steps is None else Quota(steps=steps)
    blocks = SemiAutoregressive(block_length=block_length)
    return Method(
        name="dpad",
        cache=NoCache() if cache == "none" else BlockCache(mode=cache),
        rule=StopAtEos(rule) if stop_at_eos else rule,
        schedule=DroppedSuffix(blocks, scale, decay, preserved, window, draw=draw),
        sampler=Greedy(),
    )
