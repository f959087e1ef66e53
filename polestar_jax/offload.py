"""The window's codes in pinned host memory (paper section 4.3, offloading): there between forwards, here within one.

The memory space is part of an array's type, so an operation on codes that were not fetched fails when it is traced.
On a CPU "host" is pinned host memory too, and a copy is none.
"""

from typing import Any, Literal

import jax

from polestar_jax.quantize import Codes

Offload = Literal["none", "host"]


def fetch(offload: Offload, codes: Codes, after: jax.Array | None = None) -> Codes:
    """A layer's codes on the device.

    Args:
      after: what has to be computed before the copy may begin; None for nothing.
    """
    return codes if offload == "none" else _copy(codes, jax.memory.Space.Device, after)


def store(offload: Offload, codes: Codes, after: jax.Array | None = None) -> Codes:
    """A layer's codes where they are kept; `after` as in `fetch`."""
    return codes if offload == "none" else _copy(codes, jax.memory.Space.Host, after)


def _copy(codes: Codes, space: Any, after: jax.Array | None) -> Codes:
    if after is not None:
        codes, _ = jax.lax.optimization_barrier((codes, after))
    return jax.device_put(codes, space)
