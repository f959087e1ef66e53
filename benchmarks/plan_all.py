"""Compiles whole decodes of the 8B-sized models for every GPU, on a machine that has none, and writes the table.

    python benchmarks/plan_all.py                             # all 48 cells: about an hour on two cores
    python benchmarks/plan_all.py --cells polestar,h200,256   # cells with all of these words in their names
    python benchmarks/plan_all.py --layers 2 --jobs 2         # a quick look

Each cell is `polestar plan --json` in a process of its own, because of the memory that compiling takes. It is saved in
--results as soon as it is done: kill the program at any time, run it again, and it goes on with what is missing or has
failed. The table, of the cells that were asked for, is written after every cell. To begin anew, remove the file.

Needs jax's CUDA wheels (uv sync --extra cuda13), but no GPU.
"""

import argparse
import concurrent.futures
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
METHODS = {
    "vanilla": "vanilla",
    "dual": "fast_dllm",
    "polestar": "polestar",
    "polestar offloaded": "polestar:offload=host",
}
GPUS = ("h200", "a100", "h100")  # what is most looked for first, should the run be cut short
PAPER = (
    "The paper's figures, of its own implementation in PyTorch (LLaDA-8B, G 512, batch 1, A100 80GB): peak memory"
    " 18.6 GB, offload included (D.11); Polestar adds at most 0.10 ms per layer to a step (D.10)."
)


class Cell(NamedTuple):
    """One row of the table."""

    model: str
    gen_length: int
    method: str
    gpu: str
    prompt_length: int
    layers: int | None

    @property
    def name(self) -> str:
        return f"{self.model} {self.gpu} {self.method} P {self.prompt_length} G {self.gen_length}"

    def command(self) -> list[str]:
        words = ["--model", self.model, "--gpu", self.gpu, "--method", METHODS[self.method]]
        words += ["--prompt-length", str(self.prompt_length), "--gen-length", str(self.gen_length)]
        words += [] if self.layers is None else ["--layers", str(self.layers)]
        return [sys.executable, "-m", "polestar_jax", "plan", *words, "--json", "-"]


def make_cells(options: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for, in the order in which they are compiled."""
    gpus = options.gpus.split(",")
    orders = itertools.product(("llada-8b", "dream-7b"), gpus, (256, 512), ("polestar", *METHODS))
    cells = dict.fromkeys(
        Cell(model, length, method, gpu, options.prompt_length, options.layers) for model, gpu, length, method in orders
    )
    words = options.cells.split(",")
    return [cell for cell in cells if all(word in cell.name.replace(" ", ",").split(",") for word in words if word)]


class Compiler:
    """Runs cells in processes, and knows them all, so that none outlives this program."""

    def __init__(self, timeout: float):
        self.timeout, self.lock, self.running, self.stopped = timeout, threading.Lock(), set(), False

    def compile(self, cell: Cell) -> dict[str, Any]:
        """The cell's record: what `polestar plan` says, or under "error" why it says nothing."""
        begin = time.monotonic()
        record: dict[str, Any] = {"cell": cell._asdict()}
        with self.lock:
            if self.stopped:
                return record | {"error": "stopped"}
            process = subprocess.Popen(
                cell.command(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            self.running.add(process)
        try:
            output, errors = process.communicate(timeout=self.timeout)
            lines = [line.strip() for line in errors.splitlines() if line.strip()]
            if process.returncode:
                named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)\b", line)]
                record["error"] = (named or lines or [f"exit status {process.returncode}"])[-1]
                record["errors"] = lines[-40:]
            else:
                record |= json.loads(output)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            record["error"] = f"not done after {self.timeout:.0f} s"
        except ValueError as error:
            record["error"] = f"no JSON: {error}"
        with self.lock:
            self.running.discard(process)
        return record | {"seconds": round(time.monotonic() - begin, 1)}

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for process in self.running:
                process.kill()


def read_records(path: Path) -> dict[Cell, dict[str, Any]]:
    """The last record of every cell; a line that was cut off when the program was killed counts as none."""
    records = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records[Cell(**record["cell"])] = record
    return records


def make_table(records: list[dict[str, Any]]) -> str:
    """Markdown: memory, kernels and the least time of every kind of forward, next to the paper's figures."""
    lines = []
    wanted = ("model", "gen_length", "gpu", "method")
    records = sorted(records, key=lambda record: [str(record["cell"][name]) for name in wanted])
    head = ["GPU", "method", "weights", "state", "temporaries", "in all, GB", "on the host, MB"]
    head += ["kernels per layer", "least work: GB", "TFLOP", "ms"]
    for title, group in itertools.groupby(records, _title):
        lines += [f"### {title}", "", "| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
        lines += [_row(record, len(head)) for record in group] + [""]
    done = [record for record in records if "plan" in record]
    environments = {(each["environment"]["jax"], each["environment"]["revision"]) for each in done}
    seconds = [record["plan"]["lower_seconds"] + record["plan"]["compile_seconds"] for record in done]
    lines += [
        "Planned by the compiler on a machine without a GPU; no time here was measured. In all: weights, state (KV"
        " cache, window, log, prompt), temporaries, and outputs that reuse no argument. On the host: as compiled / of"
        " the state, by shapes. Kernels per layer: device operations of one forward, its longest path, LM head and"
        " bookkeeping included, over the number of layers; + copies to and from host memory, which the copy engines do."
        " Least work: every weight read once, the cache read or written once, what else a policy keeps read and written"
        " once; ms: the larger of bytes over bandwidth and operations over the tensor cores' rate (A100 80GB SXM 2.04"
        " TB/s and 312 TFLOP/s, H100 SXM 3.35 and 989, H200 4.8 and 989: NVIDIA's data sheets).",
        "",
        PAPER,
        "",
        "Compiled with "
        + "; ".join(f"jax {version} at {revision}" for version, revision in sorted(environments, key=str))
        + (f"; {min(seconds):.0f} to {max(seconds):.0f} s a cell." if seconds else "nothing yet."),
    ]
    return "\n".join(lines) + "\n"


def _title(record: dict[str, Any]) -> str:
    cell = record["cell"]
    layers = "" if cell["layers"] is None else f", {cell['layers']} layers only"
    return f"{cell['model']}, P {cell['prompt_length']}, G {cell['gen_length']}{layers}"


def _row(record: dict[str, Any], columns: int) -> str:
    cell = record["cell"]
    cells = [cell["gpu"], cell["method"]]
    if "plan" not in record:
        problem = record["error"].replace("|", "\\|")
        return "| " + " | ".join([*cells, f"failed: {problem[:200]}"]) + " |" * (columns - 2)
    plan, least = record["plan"], record["least"]
    cells += [f"{plan[name] / 1e9:.2f}" for name in ("weights", "state", "temporaries")]
    cells += [f"**{plan['total'] / 1e9:.2f}**", f"{plan['host'] / 1e6:.1f} / {record['state_on_host'] / 1e6:.1f}"]
    each = lambda text: "<br>".join(text(kind) for kind in plan["kernels"])
    per_layer = lambda count: f"{count / plan['layers']:.1f}"
    copies = lambda kind: f" + {per_layer(plan['transfers'][kind])}" if plan["transfers"][kind] else ""
    cells.append(each(lambda kind: f"{kind} {per_layer(plan['kernels'][kind])}{copies(kind)}"))
    cells.append(each(lambda kind: f"{kind} {least[kind]['bytes'] / 1e9:.2f}"))
    cells.append(each(lambda kind: f"{least[kind]['operations'] / 1e12:.2f}"))
    cells.append(each(lambda kind: f"{1e3 * least[kind]['seconds']:.2f}"))
    if plan["copied_weights"]:
        cells[1] += f" ({len(plan['copied_weights'])} weights copied)"
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", metavar="A,B,...", help="only cells with all these words in their names")
    parser.add_argument("--gpus", default=",".join(GPUS), metavar="A,B,...", help="(default: %(default)s)")
    parser.add_argument("--prompt-length", type=int, default=1024, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, metavar="L", help="fewer layers than the models have, for a quick look")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="of a cell (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=Path("runs/plan_all.jsonl"), help="(default: %(default)s)")
    parser.add_argument("--table", type=Path, default=Path("runs/plan_all.md"), help="(default: %(default)s)")
    options = parser.parse_args()
    cells = make_cells(options)
    if not cells:
        parser.error(f"no cell has all of --cells {options.cells!r} in its name, such as in "
                     f"{Cell('llada-8b', 256, 'polestar', 'h200', 1024, None).name!r}")  # fmt: skip
    for path in (options.results, options.table):
        path.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` below runs
    records = read_records(options.results)
    missing = [cell for cell in cells if "plan" not in records.get(cell, {})]
    print(f"{len(cells)} cells, {len(missing)} to compile, {options.jobs} at a time", flush=True)
    write = lambda: options.table.write_text(make_table([records[cell] for cell in cells if cell in records]))
    compiler = Compiler(options.timeout)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool, options.results.open("a") as file:
        try:
            if file.tell():
                file.write("\n")  # the last line may have been cut off
            waiting = {pool.submit(compiler.compile, cell): cell for cell in missing}
            for number, future in enumerate(concurrent.futures.as_completed(waiting), start=1):
                cell, record = waiting[future], future.result()
                records[cell] = record
                file.write(json.dumps(record) + "\n")
                file.flush()
                write()
                said = record.get("error") or f"{record['plan']['total'] / 1e9:.2f} GB"
                print(f"{number}/{len(missing)} {cell.name}: {said} ({record['seconds']:.0f} s)", flush=True)
        finally:
            compiler.stop()
            pool.shutdown(cancel_futures=True)
    write()
    failed = [cell.name for cell in cells if "plan" not in records[cell]]
    print(f"{options.table}: {len(cells) - len(failed)} cells" + "".join(f"\nfailed: {name}" for name in failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
