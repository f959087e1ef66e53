"""From last-layer outputs to the most likely word and its probability (paper eq. 1), the logits never in memory."""

import jax

from pallas_kernels.confident_argmax import reference
from pallas_kernels.implementation import Implementation, choose

__all__ = ["confident_argmax", "pick"]


def confident_argmax(
    hidden: jax.Array,
    norm: jax.Array,
    head: jax.Array,
    *,
    epsilon: float,
    mask_id: int | None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Final RMS norm, LM head, arg max and its softmax probability, for the rows that need them.

    Logits are float32 sums, not rounded to the model's dtype. The norm is computed apart: its input is D numbers per
    row, read once. The head is read once per 64 rows ("mosaic") or 16 to 32 ("triton"), and for each row and part of
    the vocabulary four numbers are written, where XLA writes and reads `[R, V]` logits.

    Args:
      hidden: last-layer outputs `[R, D]`.
      norm: weight of the norm `[D]`, in their dtype.
      head: `[V, D]`, in their dtype.
      epsilon: of the norm.
      mask_id: the word that may not win, [MASK], which still counts in the softmax; None lets every word win.
      implementation: see `pallas_kernels.implementation.choose`; "mosaic" needs bfloat16, D a multiple of 64 and V one
        of 8, "triton" float32 or bfloat16 and D a multiple of 64.

    Returns:
      int32 `[R]`, the lowest of equally likely words, and its probability, float32 `[R]`.

    Raises:
      ValueError: if shapes do not fit or the implementation cannot run here.
    """
    size = head.shape[1]
    if hidden.ndim != 2 or hidden.shape[1] != size or norm.shape != (size,):
        raise ValueError(f"hidden {hidden.shape} and norm {norm.shape} do not fit the head's D = {size}")
    arguments = hidden, norm, head, epsilon, mask_id
    match pick(hidden, norm, head, implementation):
        case "mosaic":
            from pallas_kernels.confident_argmax import mosaic as kernels

            return kernels.confident_argmax(*arguments)
        case "triton":
            from pallas_kernels.confident_argmax import triton as kernels

            return kernels.confident_argmax(*arguments)
    return reference.confident_argmax(*arguments)


def pick(hidden: jax.Array, norm: jax.Array, head: jax.Array, implementation: Implementation | None) -> Implementation:
    """The implementation that `confident_argmax` would run; raises as it does."""
    (words, size), dtypes = head.shape, {hidden.dtype.name, norm.dtype.name, head.dtype.name}
    shape = f"D = {size} is not a multiple of 64" if size % 64 else None
    mosaic = triton = shape
    if dtypes != {"bfloat16"}:
        mosaic = f"tensor cores multiply bfloat16, not {', '.join(sorted(dtypes))}"
    elif words % 8:
        mosaic = f"V = {words} words are not a multiple of 8"
    if dtypes not in ({"bfloat16"}, {"float32"}):
        triton = f"hidden, norm and head are {', '.join(sorted(dtypes))}, not all float32 or all bfloat16"
    return choose("confident_argmax", implementation, mosaic=mosaic, triton=triton)
