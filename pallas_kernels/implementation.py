"""Which implementation of an op runs: XLA everywhere, Mosaic GPU on Hopper, Triton on Ampere and Ada."""

import importlib.util
from typing import Literal

import jax

from pallas_kernels.simulation import simulating

Implementation = Literal["xla", "mosaic", "triton"]

# Compute capabilities of devices that are only compiled for, and so cannot be asked. Longest names first.
_CAPABILITIES = {
    "GH200": 90,
    "H100": 90,
    "H200": 90,
    "A100": 80,
    "A800": 80,
    "L40S": 89,
    "L40": 89,
    "L4": 89,
    "A10": 86,
}


def capability() -> int | None:
    """The compute capability of the GPU that the caller's program is for, times ten; None where it is not for one.

    A mesh of compile-only devices counts (`jax.set_mesh`), then jax's default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        names = [name for name in _CAPABILITIES if name in device.device_kind]
        return _CAPABILITIES[names[0]] if device.platform == "gpu" and names else None
    if jax.default_backend() != "gpu":
        return None
    version = getattr(jax.devices()[0], "compute_capability", None)  # AMD's are names such as gfx942
    return round(10 * float(version)) if version and version.replace(".", "").isdigit() else None


def choose(op: str, requested: str | None, *, mosaic: str | None, triton: str | None) -> Implementation:
    """The implementation to run.

    Args:
      op: its name, for messages.
      requested: None for the best that works here, which never fails, or a name.
      mosaic, triton: why that kernel does not take these arguments, or None if it does.

    Raises:
      ValueError: if the one that was asked for cannot run here; it says why, and what can.
    """
    if requested == "xla":
        return "xla"
    if requested is None:
        found = capability()
        if found is not None and mosaic is None and _mosaic_problem(found) is None:
            return "mosaic"
        if found is not None and triton is None and _triton_problem(found) is None:
            return "triton"
        return "xla"
    if requested == "mosaic":
        problem = mosaic or (None if simulating("mosaic") else _mosaic_problem(capability()))
    elif requested == "triton":
        problem = triton or (None if simulating("triton") else _triton_problem(capability()))
    else:
        raise ValueError(f"implementation={requested!r} must be None, 'xla', 'mosaic' or 'triton'")
    if problem is not None:
        remedy = "use implementation=None for the best that works here, or 'xla'"
        raise ValueError(f"{op} with implementation={requested!r}: {problem}; {remedy}")
    return requested


def _mosaic_problem(found: int | None) -> str | None:
    # Its products are wgmma instructions, which came with 9.0 and went with 10.0.
    if found is not None and 90 <= found < 100:
        return None
    return f"it needs an NVIDIA GPU of compute capability 9.x (Hopper), and this is {_here(found)}"


def _triton_problem(found: int | None) -> str | None:
    if found is None or not 80 <= found < 90:
        return f"it needs an NVIDIA GPU of compute capability 8.x (Ampere, Ada), and this is {_here(found)}"
    if importlib.util.find_spec("jax_triton") is None:
        return "jax-triton is not installed (uv sync --extra cuda13, or pip install 'polestar-jax[cuda13]')"
    return None


def _here(found: int | None) -> str:
    return f"one of {found / 10}" if found is not None else f"a {jax.default_backend()} without one"
