"""Launching Triton kernels from jax."""

from typing import Any

import jax

from pallas_kernels.implementation import capability
from pallas_kernels.simulation import run_triton, simulating


def launch_triton(
    kernel: Any,
    *arrays: jax.Array | jax.Ref,
    out_type: Any,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 2,
    **constants: Any,
):
    """Runs a `triton.jit` kernel.

    Args:
      kernel: takes pointers to the inputs, then to the outputs, then compile-time constants by keyword.
      arrays: inputs; the kernel may write into those that are references (`jax.new_ref`).
      out_type: jax.ShapeDtypeStruct of each output.
      grid: programs, up to three axes.
      num_warps, num_stages: see Triton.
      constants: of the kernel.
    """
    if simulating("triton"):
        return run_triton(kernel, arrays, out_type, grid, constants)
    import jax_triton  # pyright: ignore[reportMissingImports]

    return jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=capability(),
        backend_options={"enable_fp_fusion": False},  # Triton warns that its default will change
        **constants,
    )
