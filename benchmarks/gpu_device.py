"""A part of `gpu_check.py`: what the device is, and how fast its memory really is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_kernels import kernel_for_here
from gpu_timing import Save, timed

from polestar_jax.analysis.costs import CEILINGS
from polestar_jax.environment import describe_environment, format_environment


def measure(rehearse: bool, save: Save) -> None:
    """Saves the environment, the data sheet's bandwidth if the device is known, and that of copies."""
    environment = describe_environment()
    print(format_environment(environment), flush=True)
    kind = environment["device"].lower()
    words = kind.replace("-", " ").split()
    # The table is of SXM modules, and of 80 GB where there are two; other boards have other memory.
    others = {"pcie", "nvl", "40gb"} & set(words)
    known = [name for name in CEILINGS if name in words and not others]
    stats = jax.devices()[0].memory_stats() or {}
    results: dict[str, Any] = {
        "environment": environment,
        "kernel": kernel_for_here(),
        "bandwidth by data sheet": CEILINGS[known[0]].bandwidth if known else None,
        "memory": stats.get("bytes_limit"),
    }
    save(results)
    count, rounds = (2**16, 2) if rehearse else (2**29, 10)
    copy = jax.jit(lambda x: jax.lax.fori_loop(0, rounds, lambda _, x: -x, x))
    array = jax.random.normal(jax.random.key(0), (count,), jnp.float32)
    seconds = float(np.median(timed(copy, array, repeat=5)))
    # One round more than the loop's: the argument, which is not given away, is copied first.
    results["bandwidth of copies, bytes read and written"] = 2 * 4 * count * (rounds + 1) / seconds
    save(results)
