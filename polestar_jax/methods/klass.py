"""KLASS (arXiv 2511.05664): commits what is sure and has stopped moving, judged by the KL of successive predictions."""

from typing import Any

from polestar_jax.block_cache import BlockCache
from polestar_jax.card import Card
from polestar_jax.head import Greedy
from polestar_jax.no_cache import NoCache
from polestar_jax.presets import choose_fields, fields_of
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.stability import Stability
from polestar_jax.types import Method

CARD = Card(
    title="KLASS",
    paper="2511.05664",
    reuses="nothing; with `cache`, as Fast-dLLM",
    refreshes="everything, in every forward; with `cache`, as Fast-dLLM",
    commits="confidence above `tau_c` where the last `history` KL divergences of a position's prediction from the one"
    " before are below `eps_kl`; if there are none, the most confident",
    state="the last distribution, G rows of V, and `history` divergences of every generated position",
    rows={"full": "N", "entry": "N", "step": "S (dual), N - start (prefix); one more where logits are shifted"},
    extra="the language-model head over all G positions in forwards over the whole canvas, their KL divergences",
    twin="`eps_kl=0` is one token per forward, `vanilla`",
)

_DREAM = {"strict": False, "gate": False}

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # The public code of LLaDA, which the paper's numbers come from, is the paper; its settings by task (scripts/):
    "release": {},
    "gsm8k": {"tau_c": 0.6, "eps_kl": 0.015},
    "math": {"tau_c": 0.6, "eps_kl": 0.01},
    "humaneval": {"tau_c": 0.9, "eps_kl": 0.01},
    "mbpp": {"tau_c": 0.7, "eps_kl": 0.01},
    # On Dream: confidence may equal tau_c, no gate; the scripts also have one block, block_length=None.
    "dream": _DREAM,
    "dream-gsm8k": _DREAM | {"tau_c": 0.9, "eps_kl": 0.001},
    "dream-math": _DREAM | {"tau_c": 0.9, "eps_kl": 0.005},
    "dream-humaneval": _DREAM | {"tau_c": 0.8, "eps_kl": 0.001},
    "dream-mbpp": _DREAM | {"tau_c": 0.9, "eps_kl": 0.001},
    # d2Cache's port, which runs with caches.
    "d2cache": {"strict": False, "gate": False},
}
"""Fields by preset; a preset changes the defaults."""

FIELDS = fields_of({"rule": Stability})


def klass(preset: str = "paper", *, cache: str = "none", block_length: int | None = 64, **fields: Any) -> Method:
    """KLASS; every field of `Stability` can be given by name.

    Args:
      preset: "paper", which the authors' public code for LLaDA agrees with; or a task's or model's numbers.
      cache: "none", or Fast-dLLM's "dual" or "prefix".
      block_length: S; None is one block, as on Dream.
      **fields: overrides of the preset's.

    Raises:
      ValueError: naming an unknown preset or field.
    """
    rule = Stability(**choose_fields("klass", PRESETS, preset, fields, FIELDS)["rule"])
    return Method(
        name="klass" if preset == "paper" else f"klass:{preset}",
        cache=NoCache() if cache == "none" else BlockCache(mode=cache),
        rule=rule,
        schedule=SemiAutoregressive(block_length=block_length, steps=rule.steps),
        sampler=Greedy(),
    )
