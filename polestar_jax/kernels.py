"""Where a decode uses the ops of `pallas_kernels`, and where XLA's path stays.

`Spec.kernels` says which implementation: None, the best that works, is XLA without a GPU, and then nothing here changes
a program. Kernels treat one device, and rotary embedding in its "rotate half" form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import confident_argmax, drift_attention, proxy_drift
from pallas_kernels.drift_reference import DriftReference
from pallas_kernels.implementation import Implementation
from polestar_jax.types import Canvas, Scope, Spec

if TYPE_CHECKING:
    from polestar_jax.drift import Floor


def implementation(spec: Spec) -> Implementation | None:
    """What to ask of an op in a decode.

    Raises:
      ValueError: if kernels were asked for by name and the decode is spread over devices.
    """
    if spec.mesh is None:
        return spec.kernels
    if spec.kernels in ("mosaic", "triton"):
        raise ValueError(
            f"kernels={spec.kernels!r} are for one device, and this decode has a mesh; use kernels=None or 'xla'"
        )
    return "xla"


def measure_proxies(
    spec: Spec, query: jax.Array, keys: jax.Array, canvas: Canvas, scope: Scope, old: DriftReference, floor: Floor
) -> tuple[jax.Array, DriftReference] | None:
    """Drift `[B, K]` of the centroids and their attention; None where XLA is to do it.

    Args:
      query: of the centroids, never rotated, `[B, K, H, A]`.
      keys: rotated, `[B, Hkv, N, A]`.
      old: rows K; of one head if heads are averaged, which kernels do not do.
      floor: other than "none" is not theirs either.
    """
    asked = implementation(spec)
    if not _comparable(query, old, floor) or proxy_drift.pick(query, keys, asked) == "xla":
        return None
    # Turning (1, 0) by an angle gives its cosine and sine.
    half, batch = query.shape[-1] // 2, canvas.position.shape[0]
    unit = jnp.broadcast_to((jnp.arange(2 * half) < half).astype(jnp.float32), (batch, spec.length, 1, 2 * half))
    turn = spec.model.rotate(unit, canvas.position)[:, :, 0]
    return proxy_drift.proxy_drift(
        query, keys, turn[..., :half], turn[..., half:], scope.visible, old, implementation=asked
    )


def attend_measuring(
    spec: Spec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_mask: jax.Array,
    old: DriftReference,
    floor: Floor,
) -> tuple[jax.Array, jax.Array, DriftReference] | None:
    """Attended values `[B, R, H, A]`, drift `[B, R]` and attention of rows; None where XLA is to do it.

    Arguments as in `attention.attend` and `measure_proxies`.
    """
    asked = implementation(spec)
    if not _comparable(query, old, floor) or drift_attention.pick(query, key, value, asked) == "xla":
        return None
    return drift_attention.drift_attention(query, key, value, key_mask, old, implementation=asked)


def _comparable(query: jax.Array, old: DriftReference, floor: Floor) -> bool:
    return floor == "none" and old.scores.shape[1] == query.shape[2]


def choose_words(spec: Spec, params, hidden: jax.Array, allow_mask: bool) -> tuple[jax.Array, jax.Array] | None:
    """Token and confidence `[B, R]` of last-layer outputs `[B, R, D]`; None where XLA is to do it, from logits.

    A model takes part by a method `head(params)`, see `models.transformer.Transformer.head`.
    """
    asked, find = implementation(spec), getattr(spec.model, "head", None)
    if find is None or asked == "xla":
        return None
    norm, weight, epsilon = find(params)
    rows = hidden.reshape(-1, hidden.shape[-1])
    if confident_argmax.pick(rows, norm, weight, asked) == "xla":
        return None
    mask_id = None if allow_mask else spec.model.config.mask_id
    found = confident_argmax.confident_argmax(
        rows, norm, weight, epsilon=epsilon, mask_id=mask_id, implementation=asked
    )
    token, confidence = (each.reshape(hidden.shape[:-1]) for each in found)
    return token, confidence
