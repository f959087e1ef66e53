"""The tables at the end of `gpu_check.py`, from what it wrote: `python benchmarks/gpu_report.py gpu_check.json`."""

import json
import sys
from pathlib import Path
from typing import Any


def print_report(content: dict[str, Any]) -> None:
    """Prints everything that was found; what is missing is said to be."""
    parts = content["parts"]
    device = parts.get("device", {}).get("results", {})
    environment = device.get("environment", {})
    print()
    if content["rehearsal"]:
        print("REHEARSAL on a CPU with tiny shapes: every number below says only that the script works.")
    print(f"{environment.get('device')}, jax {environment.get('jax')}, revision {environment.get('revision')}")
    measured = device.get("bandwidth of copies, bytes read and written")
    bandwidth = device.get("bandwidth by data sheet") or measured
    if measured:
        sheet = device.get("bandwidth by data sheet")
        print(f"memory: {measured / 1e12:.2f} TB/s copying" + (f", {sheet / 1e12:.2f} by data sheet" if sheet else ""))
    _print_kernels(parts, bandwidth)
    decodes = {name: part["results"] for name, part in parts.items() if "tps" in part.get("results", {})}
    _print_decodes(decodes, bandwidth)
    _print_comparisons(decodes)
    for name, part in parts.items():
        if part["status"] != "done":
            print(f"{name}: {part['status']}")


def _print_kernels(parts: dict[str, Any], bandwidth: float | None) -> None:
    cases = [case for part in parts.values() for case in part.get("results", {}).get("cases", [])]
    if not cases:
        return
    print(f"\n{'op':36}{'shape':20}{'same':7}{'kernel µs':>10}{'XLA µs':>10}{'MB':>9}{'at bandwidth µs':>17}")
    for case in cases:
        ms = case["ms"]
        kernel = next((1e3 * value for name, value in ms.items() if name != "xla"), None)
        least = 1e6 * case["bytes"] / bandwidth if bandwidth else None
        numbers = _cell(kernel, 10), _cell(1e3 * ms["xla"] if "xla" in ms else None, 10)
        same = {True: "yes", False: "NO", None: "-"}[case.get("same")]
        line = (
            f"{case['op']:36}{case['shape']:20}{same:7}{''.join(numbers)}{case['bytes'] / 1e6:9.2f}{_cell(least, 17)}"
        )
        cached = "read from the L2 cache" if case.get("in cache") else ""
        print("  ".join(filter(None, [line, cached, case.get("error", "")[:150]])))
        if case.get("same") is False:
            print(f"    differences: {case['differences']}")


def _print_decodes(decodes: dict[str, Any], bandwidth: float | None) -> None:
    for name, found in decodes.items():
        each = f"{found['positions per forward']:.2f} per forward"
        scaled = ", scaled up from fewer forwards" if found["scaled"] else ""
        print(f"\n{name}: {found['tps']:.1f} tokens per second at {each}{scaled}")
        size = f"{found['parameters'] / 1e9:.2f} G parameters, {found['dtype']}"
        most, before = found.get("peak bytes"), found.get("peak bytes, making weights") or 0
        peak = f", peak memory {'' if most > before else 'at most '}{most / 1e9:.2f} GB" if most else ""
        first = found["seconds to the end of the first decode, compilation included"]
        print(f"    {size}{peak}; the first decode, compilation included, took {first:.0f} s")
        for kind, ms in found["ms"].items():
            work = found.get("least", {}).get(kind)
            beside = f", {1e3 * work['bytes'] / bandwidth:.2f} ms at bandwidth" if work and bandwidth else ""
            print(f"    {kind}: {ms:.2f} ms{beside}")
        print(f"    these explain every decode within {found['largest misfit of a decode']:.1%}")
        if any(run["drift is finite"] is False for run in found["runs"].values()):
            print("    THE DRIFT IS NOT FINITE: these are times of a decode that is wrong")


def _print_comparisons(decodes: dict[str, Any]) -> None:
    print()
    with_kernels, without, offloaded = (
        decodes.get(f"polestar {rest}") for rest in ("with kernels", "without kernels", "with kernels offloaded")
    )
    if with_kernels:
        ms, layers = with_kernels["ms"], with_kernels.get("layers")
        added = ms["refresh"] - ms["step"]
        each = f", {added / layers:.3f} ms per layer (the paper's own: at most 0.10)" if layers else ""
        print(f"refresh: {ms['refresh'] / ms['step']:.2f} times a plain step{each}")
    if with_kernels and without:
        print(f"kernels: {with_kernels['tps'] / without['tps']:.2f} times the tokens per second of XLA alone", end=", ")
        pairs = list(zip(*(found["runs"]["paper"]["tokens"] for found in (with_kernels, without)), strict=True))
        print(f"{sum(a == b for a, b in pairs) / len(pairs):.0%} of the tokens the same")
    if with_kernels and offloaded:
        added = offloaded["ms"]["refresh"] - with_kernels["ms"]["refresh"]
        copies = offloaded.get("copies")
        alone = f"; its copies alone take {copies['to device'] + copies['to host']:.3f} ms" if copies else ""
        print(f"offload: {offloaded['tps'] / with_kernels['tps']:.3f} times the tokens per second of none;", end=" ")
        print(f"a refresh takes {added:+.3f} ms{alone}")


def _cell(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.1f}"


if __name__ == "__main__":
    print_report(json.loads(Path(sys.argv[1]).read_text()))
