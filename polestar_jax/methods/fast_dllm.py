"""Fast-dLLM (arXiv 2505.22618): block-wise KV cache, rebuilt at every block entry, with parallel decoding."""

from polestar_jax.block_cache import BlockCache, FirstToken
from polestar_jax.card import Card
from polestar_jax.commit import FirstTokenAtEntry, Quota, confidence_rule
from polestar_jax.head import Greedy
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.timesteps import Timesteps
from polestar_jax.types import Method

CARD = Card(
    title="Fast-dLLM",
    paper="2505.22618",
    reuses="keys and values outside the block (dual) or before it (prefix)",
    refreshes="everything, at every block entry",
    commits="confidence at least `threshold`, and the most confident; or the factor rule; or a fixed number",
    state="keys and values",
    rows={
        "entry": "N",
        "step": "S (dual), N - start (prefix); one more where logits are shifted and `first_token` is exact",
    },
    extra="none",
    twin="`dual` is what Polestar without refreshes equals",
)


def fast_dllm(
    *,
    cache: str = "dual",
    threshold: float | None = None,
    factor: float | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    first_token: FirstToken = "exact",
    block_length: int = 32,
) -> Method:
    """Fast-dLLM.

    Args:
      cache: "dual" (the default) or "prefix".
      threshold, factor: the parallel rule, as in `parallel`; threshold 0.9 if none of the three is given.
      steps: LLaDA's fixed schedule with this many forwards instead.
      guidance: scale of classifier-free guidance, or None.
      first_token: of models with shifted logits only: "entry" is the original's habit on Dream, to commit a block's
        first position, and nothing else, at the block's entry; `steps` is then Dream's schedule, by entropy. "instead"
        is that of d2Cache's frame, to run the row before the block instead of the block's last.
      block_length: S.
    """
    if steps is not None and (threshold is not None or factor is not None):
        raise ValueError(f"steps={steps} excludes threshold and factor; give one")
    rule = confidence_rule(threshold, factor) if steps is None else Quota(steps=steps)
    if first_token == "entry":
        rule = FirstTokenAtEntry(rule if steps is None else Timesteps(steps=steps, order="entropy"))
    return Method(
        name="fast_dllm",
        cache=BlockCache(mode=cache, first_token=first_token),
        rule=rule,
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
        guidance=guidance,
    )
