"""Settings of every test: CPU, strict ranks, checked annotations, one compilation cache for all workers."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile much and run little: LLVM without optimization halves their time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

from pathlib import Path

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
# A test compiles once for all xdist workers, and not at all when nothing changed since the last run. With a size limit
# jax locks the folder, so that no worker reads what another is still writing.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax"))
jax.config.update("jax_compilation_cache_max_size", 2**31)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


if os.environ.get("POLESTAR_TYPECHECK", "1") != "0":
    # Where shapes are the whole story. The public face takes NumPy arrays too, and its own errors are under test.
    arithmetic = [f"polestar_jax.{name}" for name in ("cluster", "drift", "quantize", "window")]
    jaxtyping.install_import_hook(arithmetic, "typecheck.check")


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of recorded runs of the original programs."""
    return Path(__file__).parent / "golden"


_MOST_MAPS = 30_000  # Linux allows a process 65,530, and every compiled program takes some


@pytest.fixture(autouse=True)
def _forget_programs():
    """Drops compiled programs before a worker has mapped so many that the next compilation kills it."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
