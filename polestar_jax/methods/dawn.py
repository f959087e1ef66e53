"""DAWN (arXiv 2602.06953): commits by a graph of dependencies, read off the attention of the last layers."""

from typing import Any

from polestar_jax.block_cache import BlockCache
from polestar_jax.card import Card
from polestar_jax.dependency import Dependency
from polestar_jax.head import Greedy
from polestar_jax.no_cache import NoCache
from polestar_jax.presets import choose_fields, fields_of
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Method

CARD = Card(
    title="DAWN",
    paper="2602.06953",
    reuses="nothing; with `cache`, as Fast-dLLM",
    refreshes="everything, in every forward; with `cache`, as Fast-dLLM",
    commits="confidence at least `tau_high`; at least `tau_induce` where a sure known token is attended to; at least"
    " `tau_low` where none of them attends to another; if there are none, the most confident",
    state="the confidence that every token was committed with",
    rows={"full": "N", "entry": "N", "step": "S (dual), N - start (prefix); one more where logits are shifted"},
    extra="attention of the last `attention_layers` layers once more: the block's rows, and all rows summed by key",
    twin="`tau_edge` above 1 is `parallel` with the smallest of the three confidences",
)

_LLADA = {"tau_induce": 0.7, "tau_sink": 0.01, "tau_edge": 0.07}
_DREAM = {"tau_induce": 0.75, "tau_sink": 0.03, "tau_edge": 0.1, "tau_low": 0.8}

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # What the authors' public code does differently from their algorithm 1.
    "release": {"anchors": "current", "exclusion": "induced"},
    # Table 3, by task and model.
    "gsm8k": _LLADA | {"tau_low": 0.75},
    "math": _LLADA | {"tau_low": 0.75},
    "humaneval": _LLADA | {"tau_low": 0.8},
    "mbpp": _LLADA | {"tau_low": 0.7},
    "llada15-mbpp": _LLADA | {"tau_low": 0.75},
    "dream": _DREAM,
    "dream-base": _DREAM | {"tau_edge": 0.05},
    "dream-base-gsm8k": _DREAM | {"tau_edge": 0.05, "tau_low": 0.75},
}
"""Fields by preset; a preset changes the defaults, which are the paper's for LLaDA on GSM8K."""

FIELDS = fields_of({"rule": Dependency})


def dawn(
    preset: str = "paper",
    *,
    cache: str = "none",
    attention_layers: int = 4,
    block_length: int = 32,
    **fields: Any,
) -> Method:
    """DAWN; every field of `Dependency` can be given by name.

    The released code writes position 0 of the canvas anew whenever a conflict removes a candidate: a fault, left out.

    Args:
      preset: "paper"; "release", the authors' public code; or a task's or model's numbers.
      cache: "none", or Fast-dLLM's "dual" or "prefix", whose sinks are judged by the rows that a forward computes.
      attention_layers: of how many last layers the attention is averaged.
      block_length: S.
      **fields: overrides of the preset's.

    Raises:
      ValueError: naming an unknown preset or field.
    """
    chosen = choose_fields("dawn", PRESETS, preset, fields, FIELDS)
    return Method(
        name="dawn" if preset == "paper" else f"dawn:{preset}",
        cache=NoCache(attention_layers) if cache == "none" else BlockCache(cache, attention_layers=attention_layers),
        rule=Dependency(**chosen["rule"]),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )
