"""Running the GPU kernels on a CPU, for tests: slow, and exact in values and order, but blind to layouts and time.

Mosaic kernels run in Pallas' interpreter, which also reports races; Triton kernels in Triton's own (it must be
installed, and TRITON_INTERPRET=1 set before the first kernel is imported).
"""

import contextlib
import contextvars
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

_ACTIVE: contextvars.ContextVar[str | None] = contextvars.ContextVar("simulated", default=None)


def simulating(implementation: str) -> bool:
    return _ACTIVE.get() == implementation


@contextlib.contextmanager
def simulated(implementation: str) -> Iterator[None]:
    """Makes "mosaic" or "triton" available on the CPU to calls inside, which must not be jitted.

    Raises:
      RuntimeError: for "triton" without TRITON_INTERPRET=1.
    """
    if implementation == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("simulating Triton kernels needs TRITON_INTERPRET=1 in the environment")
    token = _ACTIVE.set(implementation)
    try:
        if implementation != "mosaic":
            yield
            return
        from jax.experimental.pallas import mosaic_gpu

        with mosaic_gpu.force_gpu_interpret_mode(mosaic_gpu.InterpretGPUParams(detect_races=True)):
            yield
    finally:
        _ACTIVE.reset(token)


def races_found() -> bool:
    """Whether the last Mosaic kernel that was simulated raced."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return bool(gpu_callbacks.get_races().races_found)


def run_triton(kernel: Any, arrays: tuple, out_type: Any, grid: tuple[int, ...], constants: dict):
    """Runs a Triton kernel over NumPy copies of `arrays` and of new outputs; results as `out_type` has them.

    What it wrote into arrays that are references (`jax.Ref`) is there afterwards.
    """
    inputs = [np.array(array[...]) for array in arrays]
    leaves, tree = jax.tree.flatten(out_type)
    # Not zeros: what a kernel forgets to write must show.
    outputs = [_garbage(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
    with _bfloat16_products():
        kernel[grid](*map(_Pointer, inputs), *map(_Pointer, outputs), **constants)
    for array, written in zip(arrays, inputs, strict=True):
        if isinstance(array, jax.Ref):
            array[...] = jax.numpy.asarray(written)
    return jax.tree.unflatten(tree, [jax.numpy.asarray(output) for output in outputs])


@contextlib.contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Repairs Triton's interpreter, whose `tl.dot` takes the bits of bfloat16 for whole numbers."""
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from triton.runtime.interpreter import interpreter_builder as builder  # pyright: ignore[reportMissingImports]

    widen = lambda x: builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x
    create_dot = builder.create_dot
    builder.create_dot = lambda a, b, *rest: create_dot(widen(a), widen(b), *rest)
    try:
        yield
    finally:
        del builder.create_dot


def _garbage(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(math.prod(shape) * dtype.itemsize, 0x7B, np.uint8).view(dtype).reshape(shape)


class _Pointer:
    """What Triton's interpreter asks of a torch tensor, over a NumPy array."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_Pointer":
        return self

    def cpu(self) -> "_Pointer":
        return self

    def new_empty(self, *_, **__) -> "_Pointer":
        return _Pointer(self.array)

    def set_(self, *_) -> None: ...

    def copy_(self, _) -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides
