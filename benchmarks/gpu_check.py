"""Everything that only a GPU can tell, in under eight minutes: `benchmarks/gpu_check.sh` (docs/kernels.md, "On a GPU").

    benchmarks/gpu_check.sh                               # on an H200, H100 or A100
    python benchmarks/gpu_check.py --rehearse             # every line of it on a CPU, tiny, in two minutes
    python benchmarks/gpu_check.py --compile h200 --layers 2   # its programs, compiled for a GPU that is not here

Every part runs in a process of its own, under a limit of its own and within --budget; what does not fit any more is
left out, and a part that fails stops no other. --json is written after every part, with what unfinished ones had found.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from gpu_report import print_report

from convert.aside import write_json

ROOT = Path(__file__).resolve().parents[1]
UNTUNED = "--xla_gpu_autotune_level=0"
HIDING = "--xla_gpu_enable_latency_hiding_scheduler=true"
OTHER_SHAPES = "llada-8b refresh,llada-8b batch 8,dream-7b refresh"
# Parts have most products in common: what XLA found out about them is kept for the next part, and the next run.
CACHE = ROOT / ".cache" / "gpu_check"


class Part(NamedTuple):
    """A process.

    Attributes:
      name: in the results.
      words: that it is given.
      least, most: seconds; it is not begun with less left, and stopped after so many.
      flags: XLA's, beside those that were set already.
      instead_of: a part without which it is not needed, unless that one did not end well.
    """

    name: str
    words: tuple[str, ...]
    least: float
    most: float
    flags: str = ""
    instead_of: str = ""


def make_parts(rehearse: bool) -> list[Part]:
    """The parts, the most telling first. A rehearsal leaves out those that run no line that the others do not."""
    from gpu_decodes import PARTS, label_of

    from pallas_kernels.arguments import OPS

    limits = {"polestar": (45, 240), "fast_dllm": (30, 100), "vanilla": (30, 80)}
    decodes = [
        Part(label_of(name, kernels, offload), ("decode", name, kernels or "", offload), *limits[name])
        for name, kernels, offload in PARTS
    ]
    # An op at a time: after one that crashed a GPU does nothing more for its process.
    kernels = [Part(op, ("kernels", op, "llada-8b,dream-7b"), 15, 70) for op in OPS]
    untuned = Part("polestar with kernels, untuned", decodes[0].words, 40, 150, UNTUNED, instead_of=decodes[0].name)
    last = [
        *(Part(f"{op}, other shapes", ("kernels", op, OTHER_SHAPES), 15, 60) for op in OPS),
        Part("polestar with kernels offloaded, latency hiding", ("decode", "polestar", "", "host"), 45, 240, HIDING),
    ]
    if rehearse:  # all flags in one process, as XLA ends one that has a flag it does not know
        return [Part("device", ("device",), 0, 600, f"{UNTUNED} {HIDING}"), *kernels, *decodes[:-1]]
    return [Part("device", ("device",), 10, 60), decodes[0], untuned, *kernels, *decodes[1:], *last]


def run_part(words: list[str], target: Path, rehearse: bool) -> None:
    """In the part's own process: does the work, and keeps its results in `target`."""
    import jax

    platform = jax.default_backend()
    if (platform == "cpu") != rehearse:
        raise SystemExit(f"jax runs on {platform!r} here: a rehearsal is for a CPU, and everything else for a GPU")
    save = lambda results: write_json(target, results)
    match words:
        case ["device"]:
            from gpu_device import measure

            measure(rehearse, save)
        case ["kernels", op, shapes]:
            from gpu_kernels import measure

            measure(op, "one row" if rehearse else shapes, rehearse, save)
        case ["decode", name, kernels, offload]:
            from gpu_decodes import measure

            measure(name, kernels or None, offload, rehearse, save)
        case _:
            raise SystemExit(f"unknown part {words}")


def environment_of(part: Part, rehearse: bool) -> dict[str, str]:
    words = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    words |= {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    if rehearse:
        words["JAX_PLATFORMS"] = "cpu"
    else:
        words["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
    words["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {part.flags}".strip()
    return os.environ | words


def start_part(part: Part, limit: float, target: Path, rehearse: bool) -> dict[str, Any]:
    """Runs a part in a process; its record."""
    target.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--part", *part.words, "--json", str(target)]
    command += ["--rehearse"] if rehearse else []
    log = target.with_suffix(".log")
    begin = time.monotonic()
    with log.open("w") as file:
        # A session of its own, so that what it may have started ends with it.
        process = subprocess.Popen(
            command, env=environment_of(part, rehearse), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = "done" if process.wait(timeout=limit) == 0 else f"failed with exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold on to it
                    process.wait(timeout=20)
    record: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - begin, 1), "flags": part.flags}
    if target.exists():
        record["results"] = json.loads(target.read_text())
        target.unlink()
    if status != "done":
        record["log"] = log.read_text(errors="replace").splitlines()[-60:]
    log.unlink()
    return record


def run_all(options: argparse.Namespace) -> int:
    """Runs the parts one after the other; 1 if one did not end well."""
    begin = time.monotonic()
    parts = [part for part in make_parts(options.rehearse) if part.name == "device" or options.only in part.name]
    left = lambda: options.budget - (time.monotonic() - begin)
    print(f"{len(parts)} parts in at most {options.budget:.0f} s, results in {options.json}:")
    for part in parts:
        print(f"  {part.name}: {' '.join(word for word in part.words if word)}, at most {part.most:.0f} s")
    content: dict[str, Any] = {"rehearsal": options.rehearse, "budget": options.budget, "parts": {}}
    scratch = options.json.with_name(options.json.name + ".part")
    for part in parts:
        if content["parts"].get(part.instead_of, {}).get("status") == "done":
            continue
        limit = min(600 if options.rehearse else part.most, left())
        if limit < part.least:
            record = {"status": f"left out: {max(left(), 0):.0f} s were left, and it needs {part.least:.0f} s"}
        else:
            print(f"{part.name} ...", flush=True)
            record = start_part(part, limit, scratch, options.rehearse)
        content["parts"][part.name] = record
        content["seconds"] = round(time.monotonic() - begin, 1)
        write_json(options.json, content)
        print(f"{part.name}: {record['status']}, {record.get('seconds', 0):.0f} s", flush=True)
        for line in record.get("log", [])[-8:]:
            print("    " + line[:300])
        if part.name == "device" and "results" not in record:
            print("without a device there is nothing to measure")
            return 1
    print_report(content)
    unfinished = [record["status"] for record in content["parts"].values() if record["status"] != "done"]
    return int(any(not status.startswith("left out") for status in unfinished))


def compile_all(gpu: str, layers: int, only: str) -> int:
    """Compiles the programs of every part for a GPU that need not be here; 1 if one does not compile."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import gpu_decodes
    import gpu_kernels

    from pallas_kernels.shapes import REAL
    from polestar_jax.aot import compile_for, compile_plan

    kernel = "triton" if gpu in ("a100", "l4") else "mosaic"
    tasks = [
        (name, lambda run=run, arguments=arguments: compile_for(gpu, run, *arguments))
        for name, run, arguments in gpu_kernels.programs(",".join(REAL), kernel)
    ]
    tasks += [
        (name, lambda decode=decode, length=length: compile_plan(decode, gpu, length))
        for name, decode, length in gpu_decodes.programs(kernel, layers)
    ]
    failed = 0
    for name, run in tasks:
        if only not in name:
            continue
        begin, problem = time.monotonic(), ""
        try:
            run()
        except Exception:
            problem, failed = traceback.format_exc(), failed + 1
        verdict = "does not compile" if problem else "compiles"
        print(f"{verdict} for {gpu} ({time.monotonic() - begin:.1f} s): {name}\n{problem}".rstrip(), flush=True)
    return int(failed > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="results (default: %(default)s)")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds in all (default: 460)")
    parser.add_argument("--only", default="", metavar="TEXT", help="parts with this in their names, after the device")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes and simulated kernels")
    parser.add_argument("--compile", metavar="GPU", help="only compile the programs for a100, h100, h200 or l4")
    parser.add_argument("--layers", type=int, default=2, help="of --compile's decodes (default: %(default)s)")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        sys.exit(compile_all(options.compile, options.layers, options.only))
    if options.part:
        return run_part(options.part, options.json, options.rehearse)
    options.budget = options.budget or (3600 if options.rehearse else 460)
    options.json = options.json.absolute()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running part is stopped, too
    sys.exit(run_all(options))


if __name__ == "__main__":
    main()
