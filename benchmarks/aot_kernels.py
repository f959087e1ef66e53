"""Compiles every kernel for the GPUs it is for, on a machine that has none: `make aot`.

Mosaic kernels for sm_90 (H100), Triton kernels for sm_80 (A100) and sm_89 (L4), at the real shapes of
`pallas_kernels.shapes`. Prints a table, and fails if anything does not compile. "least" is what must move: arguments
read and results written once; "temporaries" is memory that XLA adds for what passes between an op's kernels.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
os.environ.pop("TRITON_INTERPRET", None)

import argparse
import contextlib
import functools
import re
import sys
import tempfile
import time
import traceback

import jax

from pallas_kernels.arguments import OPS
from pallas_kernels.shapes import REAL
from polestar_jax.aot import compile_for

PLANS = (("h100", "mosaic"), ("a100", "triton"), ("l4", "triton"))


@contextlib.contextmanager
def output_to(file):
    """Sends what native code prints to a file."""
    saved = os.dup(1), os.dup(2)
    sys.stdout.flush()
    os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved[0], 1), os.dup2(saved[1], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="", help="only ops whose name contains this")
    parser.add_argument("--shape", default="", help="only shapes whose name contains this")
    parser.add_argument("--gpu", default="", help="only this target")
    chosen = parser.parse_args()
    failures = 0
    print(
        f"{'op':36}{'shape':20}{'gpu':6}{'kernel':8}{'ok':4}{'seconds':>8}{'least':>13}{'temporaries':>13}  registers"
    )
    for gpu, implementation in PLANS:
        if chosen.gpu not in ("", gpu):
            continue
        for name, (op, make) in OPS.items():
            for shape_name, shape in REAL.items():
                if chosen.op not in name or chosen.shape not in shape_name:
                    continue
                arguments = make(shape)
                moved = jax.tree.leaves((arguments, jax.eval_shape(op, *arguments)))
                least = sum(leaf.size * leaf.dtype.itemsize for leaf in moved)
                begin, problem, temporaries = time.perf_counter(), "", 0
                with tempfile.TemporaryFile("w+") as log:
                    with output_to(log):
                        try:
                            compiled = compile_for(
                                gpu, functools.partial(op, implementation=implementation), *arguments
                            )
                            temporaries = compiled.memory_analysis().temp_size_in_bytes
                        except Exception:
                            problem = traceback.format_exc()
                    log.seek(0)
                    text = log.read()
                    used = [*re.findall(r"Used \d+ registers", text), *re.findall(r"[1-9]\d* bytes spill", text)]
                seconds = time.perf_counter() - begin
                failures += bool(problem)
                print(
                    f"{name:36}{shape_name:20}{gpu:6}{implementation:8}{'no' if problem else 'yes':4}{seconds:8.1f}"
                    f"{least / 1e6:10.2f} MB{temporaries / 1e6:10.2f} MB  {', '.join(used)}",
                    flush=True,
                )
                if problem:
                    print(problem, file=sys.stderr)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
