"""Elastic-Cache (arXiv 2510.14973): a sliding window, and deep layers recomputed when attention has drifted.

No public code of it was at hand; where two descriptions of that code and the paper differ, a field has both readings.
"""

from typing import Any

from polestar_jax.card import Card
from polestar_jax.commit import confidence_rule
from polestar_jax.early_stop import EndAtEos
from polestar_jax.elastic_policy import Along, ElasticCache
from polestar_jax.head import Greedy
from polestar_jax.sliding_window import SlidingWindow
from polestar_jax.types import Method

CARD = Card(
    title="Elastic-Cache",
    paper="2510.14973",
    reuses="below the boundary, keys and values of every row but the window's, the last commits' and the most attended"
    " tokens'",
    refreshes="everything in the layers above the first one whose most attended tokens attend differently, by a cosine"
    " below `gamma`, than in the forward before",
    commits="of the first `window` masks, those with confidence at least `threshold`, and the most confident",
    state="keys, values and inputs of every layer; the most attended token of every layer",
    rows={
        "full": "N",
        "elastic": "(l Q + (L - l) N) / L: l layers below the boundary, Q = window + committed + tracked",
    },
    extra="attention of the tracked tokens before and now, in every layer",
    twin="no cache under the same schedule: boundary = 0",
)

PRESETS: dict[str, dict[str, Any]] = {"paper": {}, "release": {"along": "heads", "stop_at_eos": True}}
"""`release` is the public code as others describe it."""


def elastic_cache(
    preset: str = "paper",
    *,
    threshold: float | None = None,
    factor: float | None = None,
    gamma: float = 0.9,
    boundary: float = float("inf"),
    window: int = 16,
    track: int = 1,
    along: Along | None = None,
    stop_at_eos: bool | None = None,
) -> Method:
    """Elastic-Cache.

    Args:
      preset: "paper" or "release".
      threshold, factor: the commit rule, as in `parallel`.
      gamma, boundary, window, track, along: see `ElasticCache`; `along` is the preset's unless given.
      stop_at_eos: give up the masks right of an EOS, as the release does; they stay masked.

    Raises:
      ValueError: naming an unknown preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} must be one of {', '.join(PRESETS)}")
    fields = {"along": "keys", "stop_at_eos": False} | PRESETS[preset]
    fields |= {name: value for name, value in (("along", along), ("stop_at_eos", stop_at_eos)) if value is not None}
    rule = confidence_rule(threshold, factor)
    return Method(
        name="elastic_cache" if preset == "paper" else f"elastic_cache:{preset}",
        cache=ElasticCache(gamma=gamma, boundary=boundary, window=window, track=track, along=fields["along"]),
        rule=EndAtEos(rule) if fields["stop_at_eos"] else rule,
        schedule=SlidingWindow(window=window, stop_at_eos=fields["stop_at_eos"]),
        sampler=Greedy(),
    )
