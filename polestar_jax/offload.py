"""The window's codes in pinned host memory (paper section 4.3, offloading): there between forwards, here within one.

The memory space is part of an array's type, so an operation on codes that were not fetched fails when it is traced.
On a CPU "host" is pinned host memory too, and a copy is none.
"""

import dataclasses
from typing import Any, Literal

import jax

from polestar_jax.window import LayerWindow

Offload = Literal["none", "host"]


def fetch(offload: Offload, window: LayerWindow, after: jax.Array | None = None) -> LayerWindow:
    """The window with its codes on the device.

    Args:
      after: what has to be computed before the copy may begin; None for nothing.
    """
    if offload == "none":
        return window
    if after is not None:
        codes, _ = jax.lax.optimization_barrier((window.codes, after))
        window = dataclasses.replace(window, codes=codes)
    return _move(window, jax.memory.Space.Device)


def store(offload: Offload, window: LayerWindow) -> LayerWindow:
    """The window with its codes where they are kept."""
    return _move(window, jax.memory.Space.Host) if offload == "host" else window


def _move(window: LayerWindow, space: Any) -> LayerWindow:
    return dataclasses.replace(window, codes=jax.device_put(window.codes, space))
