"""One body per op for all implementations: on this machine the GPU's run in simulators, exact in values and order."""

import functools
import importlib.util
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

import jax
import pytest

from pallas_kernels.simulation import races_found, simulated

without_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: uv sync --group triton-test"
)


@pytest.fixture(params=["xla", "mosaic", pytest.param("triton", marks=without_triton)])
def run(request):
    """Runs an op in one implementation, in the simulator that makes it work here; races fail the test."""
    name = request.param

    def run(op, *arguments):
        bound = functools.partial(op, implementation=name)
        if name == "xla":
            return jax.jit(bound)(*arguments)
        with simulated(name):
            result = jax.block_until_ready((bound if name == "triton" else jax.jit(bound))(*arguments))
            assert name != "mosaic" or not races_found()
            return result

    run.name = name
    return run
