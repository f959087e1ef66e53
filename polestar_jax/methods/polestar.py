"""Polestar (arXiv 2607.14107): Polestar-Cache and Polestar-Commit over semi-autoregressive blocks."""

from typing import Any

from polestar_jax.card import Card
from polestar_jax.commit import PolestarCommit
from polestar_jax.head import Greedy
from polestar_jax.polestar_cache import PolestarCache
from polestar_jax.presets import choose_fields, fields_of
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import Method

CARD = Card(
    title="Polestar",
    paper="2607.14107",
    reuses="keys and values outside the block; layer inputs of the window, coded",
    refreshes="in every layer the `selected` clusters of window rows whose attention drifted most, when more than"
    " `update_threshold` tokens were committed since the last time; window and block, or everything, at block entries",
    commits="confidence at least `tau`, or a drift gate below it, and the most confident; confident suffix positions of"
    " a refresh",
    state="keys and values; codes, centroids and labels of the window per layer; attention of the block's rows",
    rows={
        "step": "S, one more where logits are shifted",
        "refresh": "as step, and the selected rows",
        "window entry": "as step, and W or what the canvas has of it",
        "full entry": "N",
    },
    extra="drift of the block's rows (last layer) and of K centroids (every layer, refreshes); k-means at entries",
    twin="`parallel`: window over everything, a refresh in every forward, every cluster selected, no codes, gate and"
    " suffix off; `fast_dllm`: never a refresh, gate and suffix off, every entry full",
)

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # What the authors' public code does differently from their text (docs/methods.md says more).
    "release": {
        "selected_last": 1,
        "update_threshold": 2,
        "step_threshold": 1,
        "window_entry_period": 4,
        "format": "none",
        "count_eos": True,
        "refresh_tokens": False,
        "memberless": True,
        "random_start": True,
        "suffixless_keeps_all": False,
        "epsilon": 1e-6,
        "token_floor": "clamp",
        "proxy_floor": "add",
        "gate_floor": 0.7,
        "gate_ceiling": 2.0,
        "allow_mask": True,
    },
}
"""Fields by preset; a preset changes the defaults, which are the paper's."""

FIELDS = fields_of({"cache": PolestarCache, "rule": PolestarCommit, "sampler": Greedy})
"""Every field of a Polestar config, and the part of the method that has it."""


def polestar(preset: str = "paper", *, block_length: int = 32, **fields: Any) -> Method:
    """Polestar; every field of `PolestarCache` and `PolestarCommit` can be given by name.

    The component ablation of the paper's table 4: `drift_gate=False, suffix_commit=False` is Polestar-Cache alone,
    `suffix_commit=False` adds the current block's commits.

    Args:
      preset: "paper", the text of the paper, or "release", the authors' public code.
      block_length: S.
      **fields: overrides of the preset's.

    Raises:
      ValueError: naming an unknown preset or field.
    """
    chosen = choose_fields("polestar", PRESETS, preset, fields, FIELDS)
    return Method(
        name="polestar" if preset == "paper" else f"polestar:{preset}",
        cache=PolestarCache(**chosen["cache"]),
        rule=PolestarCommit(**chosen["rule"]),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(**chosen["sampler"]),
    )
