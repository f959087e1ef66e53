"""Sweeps of the constants that no source gives: EntropyCache's tau_H and Dynamic-dLLM's budget scale.

    python benchmarks/calibrate_caches.py [NAME ...] [--model polestar-tiny] [--items 64] [--json out.json]

Held-out items of an embedded checkpoint, decoded with the same rule (threshold 0.9) and blocks. Accuracy, its
difference from that of the default on the same items, tokens per forward and rows per forward for each value;
`parallel` recomputes everything, which is what a cache is compared with. Sizes made for 256 generated tokens are scaled
to the checkpoint's: k = 12, windows and budgets of 6 rows.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from models.embedded import checkpoint, tasks
from polestar_jax import load, methods
from polestar_jax.environment import describe_environment, format_environment
from polestar_jax.evaluation.measure_points import measure_method
from polestar_jax.metrics import paired_difference
from polestar_jax.types import Method

COMMON = {"threshold": 0.9, "block_length": checkpoint.BLOCK}
SWEEPS: dict[str, tuple[Callable[[float], Method], float, tuple[float, ...]]] = {
    "parallel": (lambda threshold: methods.parallel(**COMMON | {"threshold": threshold}), 0.9, (0.9,)),
    "entropy_cache": (
        lambda value: methods.entropy_cache(max_entropy=value, recent=12, **COMMON),
        0.5,
        (0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, float("inf")),
    ),
    "dynamic_dllm": (
        lambda value: methods.dynamic_dllm(budget_scale=value, budget=6, window=6, **COMMON),
        10.0,
        (0.0, 1.0, 10.0, 50.0, 200.0, 1000.0),
    ),
}
"""By method: the method of a value, the default and all values of its constant."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SWEEPS)}; all unless given")
    parser.add_argument("--model", default="polestar-tiny")
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.items < 1:
        parser.error(f"--items {arguments.items} must be at least 1")
    if unknown := set(arguments.names) - SWEEPS.keys():
        parser.error(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(SWEEPS)}")
    checkpoint = load(arguments.model)
    items = tasks.make_items("heldout", arguments.items, arguments.seed)
    environment = describe_environment(dtype=checkpoint[0].config.dtype)
    print(format_environment(environment))
    print(f"{arguments.model}, {arguments.items} held-out items, seed {arguments.seed}")
    print(
        f"{'':<14} {'value':>8} {'right':>12} {'- default':>14} {'TPF':>6} {'rows':>6} {'forwards':>9}  kinds per item"
    )
    rows = []
    for name in arguments.names or SWEEPS:
        make, default, values = SWEEPS[name]
        settings = (items, tasks.ANSWER_LENGTH, arguments.seed)
        found = {value: measure_method(*checkpoint, make(value), *settings) for value in values}
        for value in values:
            row = found[value]
            difference, error = paired_difference(row["correct"], found[default]["correct"])
            rows.append({"sweep": name, "value": str(value), "difference": difference, "paired_error": error} | row)
            kinds = ", ".join(f"{kind} {count:.1f}" for kind, count in row["kinds"].items())
            right = f"{row['accuracy']:>6.1%} ±{row['accuracy_error']:.1%}"
            print(
                f"{name:<14} {value:>8g} {right} {difference:>+7.1%} ±{error:.1%}"
                f" {row['tpf']:>6.2f} {row['rows_per_forward']:>6.1f} {row['forwards']:>9.1f}  {kinds}",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
