"""The paper's ablations as lists of methods: what is varied, over which values (table 5), which is the default."""

from typing import NamedTuple


class Point(NamedTuple):
    """One setting.

    Attributes:
      label: under its bar.
      method: words that ask for it, as on the command line.
      default: whether it is Polestar's own; starred.
      blocks: block length relative to the default one.
    """

    label: str
    method: str
    default: bool = False
    blocks: float = 1.0


class Sweep(NamedTuple):
    """One ablation.

    Attributes:
      title: what is varied, and the paper's table or figure.
      points: in order.
    """

    title: str
    points: tuple[Point, ...]


def _field(name: str, values: dict[str, str], default: str) -> tuple[Point, ...]:
    return tuple(Point(label, f"polestar:{name}={value}", label == default) for label, value in values.items())


def _numbers(name: str, values: str, default: str) -> tuple[Point, ...]:
    return _field(name, {value: value for value in values.split()}, default)


_CACHE = "polestar:drift_gate=false:suffix_commit=false"
_BLOCK = "polestar:suffix_commit=false"

SWEEPS = {
    "components": Sweep(
        "Components (table 4)",
        (
            Point("one per forward", "vanilla"),
            Point("parallel", "parallel"),
            Point("Fast-dLLM", "fast_dllm"),
            Point("Polestar-Cache", _CACHE),
            Point("+ block commit", _BLOCK),
            Point("+ suffix commit", "polestar", default=True),
        ),
    ),
    "commit": Sweep(
        "Commitment rule on Polestar-Cache (figure 6b)",
        (
            Point("confidence 0.9", _CACHE),
            Point("confidence 0.7", f"{_CACHE}:tau=0.7"),
            *(Point(f"raw drift > {x}", f"{_BLOCK}:alpha=0:history=0:gate_level={x}") for x in (0.5, 1, 2)),
            *(Point(f"drift delta > {x}", f"{_BLOCK}:alpha=0:gate_level={x}") for x in (0.5, 1, 2)),
            Point("dynamic delta", _BLOCK),
            Point("+ suffix", "polestar", default=True),
        ),
    ),
    "selected": Sweep("Selected clusters k of K = 8 (figure 6c)", _numbers("selected", "2 4 6 8", "4")),
    "update": Sweep("Refresh trigger (figure 6d)", _numbers("update_threshold", "1 2 3 4 inf", "3")),
    "clusters": Sweep("Centroids K (figure 7a)", _numbers("clusters", "4 8 16", "8")),
    "window": Sweep(
        "Local window, blocks before and after (figure 7b)",
        tuple(
            Point(f"({p}, {s})", f"polestar:prefix_blocks={p}:suffix_blocks={s}", (p, s) == (2, 1))
            for p, s in ((1, 0), (1, 1), (2, 1), (2, 2), (3, 1))
        ),
    ),
    "block": Sweep(
        "Block length, times the default (figure 9a)",
        tuple(Point(f"{x:g}x", "polestar", x == 1, x) for x in (0.5, 1, 2)),
    ),
    "history": Sweep("Drift history h (figure 9)", _numbers("history", "0 1 3 5 7", "5")),
    "alpha": Sweep("Drift-gate coefficient (figure 9)", _numbers("alpha", "2.5 5 10 20 40", "10")),
    "suffix": Sweep("Suffix confidence (figure 9)", _numbers("suffix_tau", "0.85 0.9 0.95", "0.9")),
    "tau": Sweep("Commit confidence (table 5)", _numbers("tau", "0.7 0.9", "0.9")),
    "format": Sweep(
        "Format of the window's hidden states (table 11)",
        (
            Point("none", "polestar:format=none"),
            *(
                Point(
                    f"{name} {kind}", f"polestar:format={name}:residual={value}", (name, kind) == ("nvfp4", "residual")
                )
                for name in ("fp8", "int8", "mxfp4", "int2", "nvfp4")
                for kind, value in (("direct", "false"), ("residual", "true"))
            ),
        ),
    ),
}
