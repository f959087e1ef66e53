"""Converts checkpoints of LLaDA-8B's and Dream-7B's shapes, and says what that costs beside copying the bytes.

    python benchmarks/convert_scale.py --family llada --kill --back

makes a Hugging Face folder of random bfloat16 weights with the real names in four or more shards, copies it with `cp`
and `sync`, converts it with `polestar convert`, and prints wall times, peak memory of the converting process and bytes
written. `--kill` kills a second conversion with signal 9 half way, resumes it and compares every value; `--back`
converts the result back and compares every tensor with the shards. Before a file is read for a measurement it is
dropped from the page cache. Needs three times the size of the checkpoint (48 GB), and deletes what it made.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

os.environ["JAX_PLATFORMS"] = "cpu"

from convert import open_source
from convert.aside import aside_of
from convert.names import flatten
from convert.source import FAMILIES, Leaf, Source
from convert.writer import write_weights
from models.published import DREAM_7B, LLADA_8B
from models.transformer import Config, Transformer
from polestar_jax.environment import cpu_model, git_revision

SHARDS = 4
SHAPES = {"llada": LLADA_8B, "dream": DREAM_7B}
SMALL = dict(vocab_size=1000, mask_id=999, eos_id=998, model_size=256, layers=4, heads=4, kv_heads=4, feed_forward=512)


def make_folder(folder: Path, config: Config) -> int:
    """Writes a Hugging Face folder of random weights, one tensor at a time; returns the bytes of its weights."""
    family, (naming, *_) = FAMILIES[{"llada": "llada", "dream": "Dream"}[config.family]]
    shapes = {path: leaf.shape for path, leaf in flatten(Transformer(config).abstract_params()).items()}
    random = np.random.default_rng(0)

    def read(paths: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        for path in paths:
            bits = np.frombuffer(random.bytes(2 * int(np.prod(shapes[path]))), np.uint16)
            # Random sign, mantissa and two bits of the exponent: values of 2**-7 to 2**-4.
            yield path, (bits & 0x81FF | 0x3C00).view(ml_dtypes.bfloat16).reshape(shapes[path])

    source = Source(
        config=config,
        fields=family.write_config(config),
        naming=naming,
        leaves={path: Leaf(path, shape, "bfloat16") for path, shape in shapes.items()},
        read=read,
    )
    size = sum(map(source.size, shapes))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(source.fields_out(), indent=2))
    write_weights(folder, source, lambda path, size: None, limit=size // SHARDS)
    return size


def forget(folder: Path) -> None:
    """Drops a folder's files from the page cache, so that whoever reads them next reads the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def copy(source: Path, target: Path) -> float:
    """Seconds of `cp -r` and `sync`."""
    forget(source)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished `polestar convert`: exit status (negative: the signal), seconds with `sync`, and memory in bytes."""

    status: int
    seconds: float
    peak: int

    def describe(self, written: Path) -> str:
        return f"peak memory {self.peak / 2**30:.2f} GiB; {size_of(written) / 1e9:.3f} GB written"


def convert(source: Path, target: Path, *words: str, kill_at: int | None = None) -> Run:
    """Runs `polestar convert` as a process of its own; kills it when so many bytes lie aside."""
    forget(source)
    command = [sys.executable, "-m", "polestar_jax", "convert", str(source), str(target), *words]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, high_water(process.pid))
        if kill_at is not None and size_of(aside_of(target)) >= kill_at:
            process.kill()
        time.sleep(0.05)
    if target.exists():
        subprocess.run(["sync", "-f", target], check=True)
    return Run(process.returncode, time.perf_counter() - start, peak)


def high_water(process: int) -> int:
    """Most bytes that a process has had resident. (`getrusage` would count what its parent had before it forked.)"""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def size_of(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed between listing and looking
            size += path.stat().st_size if path.is_file() else 0
    return size


def count_equal(first: Path, second: Path) -> str:
    """How many tensors of two checkpoints of any kind have equal bits, of how many."""
    a, b = open_source(first), open_source(second)
    assert a.leaves.keys() == b.leaves.keys() and a.config == b.config
    equal = 0
    for path, values in a.read(a.leaves):
        ((_, others),) = b.read([path])
        equal += values.dtype == others.dtype and np.array_equal(values.view(np.uint16), others.view(np.uint16))
    return f"{equal} of {len(a.leaves)}"


def say(words: str) -> None:
    print(words, flush=True)


def measure(work: Path, source: Path, *, kill: bool, back: bool) -> None:
    target = work / "orbax"
    size, shards = size_of(source), len(list(source.glob("*.safetensors")))
    say(f"{source}: {size / 1e9:.3f} GB in {shards} shards")

    copying = copy(source, work / "copy")
    say(f"cp + sync: {copying:.1f} s, {size / copying / 1e9:.2f} GB/s")
    shutil.rmtree(work / "copy")

    run = convert(source, target)
    assert run.status == 0
    say(f"polestar convert + sync: {run.seconds:.1f} s, {run.seconds / copying:.2f} x cp; {run.describe(target)}")

    if back:
        run = convert(target, work / "back", "--to", "hf")
        assert run.status == 0
        say(f"back to Hugging Face: {run.seconds:.1f} s; {run.describe(work / 'back')}")
        say(f"there and back: {count_equal(source, work / 'back')} tensors have equal bits")
        shutil.rmtree(work / "back")
    shutil.rmtree(target)

    if kill:
        run = convert(source, target, kill_at=size // 2)
        assert run.status == -signal.SIGKILL and not target.exists()
        say(f"killed with signal 9: {size_of(aside_of(target)) / 1e9:.3f} GB left aside")
        run = convert(source, target, "--resume")
        assert run.status == 0
        say(f"resumed: {run.seconds:.1f} s; {run.describe(target)}")
        say(f"killed and resumed: {count_equal(source, target)} tensors have equal bits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=sorted(SHAPES), action="append", help="(default: both)")
    parser.add_argument("--scale", choices=("full", "small"), default="full", help="small: a few MB, for tests")
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    parser.add_argument("--kill", action="store_true", help="also kill a conversion half way and resume it")
    parser.add_argument("--back", action="store_true", help="also convert back and compare")
    parser.add_argument("--source", type=Path, help="measure this Hugging Face folder instead of making any")
    arguments = parser.parse_args()
    say(f"{cpu_model()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, revision {git_revision()}")
    work = Path(tempfile.mkdtemp(prefix="convert-", dir=arguments.folder))
    try:
        for source in [arguments.source] if arguments.source else made(work, arguments):
            measure(work, source, kill=arguments.kill, back=arguments.back)
            shutil.rmtree(work / "orbax", ignore_errors=True)
    finally:
        shutil.rmtree(work)


def made(work: Path, arguments: argparse.Namespace) -> Iterator[Path]:
    """Makes the folders, one at a time."""
    for family in arguments.family or sorted(SHAPES):
        config = SHAPES[family]
        if arguments.scale == "small":
            config = dataclasses.replace(config, **SMALL)
        make_folder(work / family, config)
        yield work / family
        shutil.rmtree(work / family)


if __name__ == "__main__":
    main()
