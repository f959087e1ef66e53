"""Where a decode uses the ops of `pallas_kernels`, and where XLA's path stays.

`Spec.kernels` says which implementation: None, the best that works, is XLA without a GPU, and then nothing here changes
a program. Kernels treat one device, and rotary embedding in its "rotate half" form.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import confident_argmax, proxy_drift
from pallas_kernels.drift_reference import DriftReference, pad_keys
from pallas_kernels.implementation import Implementation
from polestar_jax.drift import Floor
from polestar_jax.types import Canvas, Scope, Spec


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
    spec: Spec, query: jax.Array, keys: jax.Array, canvas: Canvas, scope: Scope, old: jax.Array, floor: Floor
) -> tuple[jax.Array, jax.Array] | None:
    """Drift `[B, K]` of the centroids and their log attention `[B, H, K, N]`; None where XLA is to do it.

    Args:
      query: of the centroids, never rotated, `[B, K, H, A]`.
      keys: rotated, `[B, Hkv, N, A]`.
      old: log attention `[B, h, K, N]`; of one head if heads are averaged, which kernels do not do.
      floor: other than "none" is not theirs either.
    """
    asked = implementation(spec)
    if floor != "none" or old.shape[1] != query.shape[2] or proxy_drift.pick(query, keys, asked) == "xla":
        return None
    # Turning (1, 0) by an angle gives its cosine and sine.
    half, batch = query.shape[-1] // 2, canvas.position.shape[0]
    unit = jnp.broadcast_to((jnp.arange(2 * half) < half).astype(jnp.float32), (batch, spec.length, 1, 2 * half))
    turn = spec.model.rotate(unit, canvas.position)[:, :, 0]
    # Log probabilities are scores whose log sum is 0: the divergence does not see the difference.
    before = DriftReference(pad_keys(old), jnp.zeros(old.shape[:-1], jnp.float32))
    score, new = proxy_drift.proxy_drift(
        query, keys, turn[..., :half], turn[..., half:], scope.visible, before, implementation=asked
    )
    return score, (new.scores - new.log_sum[..., None])[..., : spec.length]


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
