"""Decodes over a mesh: `four_devices.py` in a process with four virtual devices, and two processes on one host."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from methods_table import FAMILIES

ROOT = Path(__file__).parents[1]


def run(*words: str, **variables: str) -> None:
    """Runs Python in a process of its own, with further environment variables."""
    # Programs that are run a few times only are worth a quick compilation.
    settings = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = os.environ | settings | variables
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


def run_four(*options: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    words = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/four_devices.py", *options)
    run(*words, XLA_FLAGS=flags)


@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_of_a_family(family: str):
    run_four("-k", f"one_device and {family}")


def test_everything_else_about_a_mesh():
    run_four("-k", "not one_device")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_over_other_shapes(family: str):
    run_four("-m", "slow", "-k", f"one_device and {family}")


def run_two(*options: str) -> None:
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"), "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**31)}
    run("benchmarks/two_processes.py", *options, **cache, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.5")


def test_two_processes():
    run_two("--methods", "fast_dllm")


@pytest.mark.slow
@pytest.mark.parametrize("across", [(), ("--across",)], ids=["batch", "layers"])
def test_two_processes_with_every_method(across: tuple[str, ...]):
    run_two(*across)
