"""The record that is printed with every number: on what it was measured, and by which code."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]


def describe_environment(*, dtype: str | None = None, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Hardware, versions and date.

    Args:
      dtype: of the weights in use.
      command: the words that were typed, to repeat the measurement.

    Returns:
      Values that JSON can hold; None where something cannot be found out.
    """
    import jax

    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": None if command is None else shlex.join(command),
        "polestar_jax": _version("polestar-jax"),
        "revision": git_revision(),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("jax", "jaxlib", "flax", "numpy")},
        "os": platform.platform(),
        "cpu": cpu_model(),
        "cores": cores,
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "dtype": dtype,
    }


def format_environment(environment: dict[str, Any]) -> str:
    """One line for people."""
    device = environment["device"]
    if environment["platform"] != "cpu":
        device = f"{environment['devices']} x {device}"
    return (
        f"{device} device, {environment['cpu']} ({environment['cores']} cores), {environment['dtype']};"
        f" polestar_jax {environment['polestar_jax']} at {environment['revision'] or 'no git revision'},"
        f" jax {environment['jax']}, jaxlib {environment['jaxlib']}, flax {environment['flax']},"
        f" Python {environment['python']}, {environment['os']}; {environment['date']}"
    )


def cpu_model() -> str | None:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine() or None


def git_revision() -> str | None:
    """The commit of this checkout, `-dirty` if it was changed; None for an installed package."""
    # Without a repository of its own, git would describe whatever repository the package is installed inside.
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
