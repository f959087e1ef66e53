"""Pieces shared by the decoders: linear maps in HF orientation, RMS norm, rotary position, a transformer block.

Axis letters: B batch rows, R sequence rows, D model size, H query heads, Hkv key heads, A head size, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx


def rotate(x: jax.Array, positions: jax.Array, theta: float, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Applies rotary position embedding, half-split ("rotate half") form.

    Position 0 is the identity and `-positions` undoes `positions`, which is how proxies read rotated keys.

    Args:
      x: `[..., R, H, A]`.
      positions: int32 `[..., R]`.
      theta: base of the rotation frequencies.
      dtype: arithmetic of the rotation; cos and sin are computed in float32 and cast to it.

    Returns:
      `[..., R, H, A]` in the dtype of `x`.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.expand_dims(jnp.multiply.outer(positions.astype(jnp.float32), frequency), -2)
    cos, sin = jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)
    low, high = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


class Linear(nnx.Module):
    """`x @ weight.T (+ bias)`; `weight` is `[out, in]` as in HF files, so conversion transposes nothing."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, dtype: jnp.dtype, rngs: nnx.Rngs):
        scale = inputs**-0.5
        self.weight = nnx.Param(scale * jax.random.normal(rngs.params(), (outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.lax.dot_general(x, self.weight[...], (((x.ndim - 1,), (1,)), ((), ())))
        return y if self.bias is None else y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    """Root-mean-square norm: float32 inside, multiplied by the weight after the cast back, as the originals do."""

    def __init__(self, size: int, *, epsilon: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return wide.astype(x.dtype) * self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))


class Block(nnx.Module):
    """A pre-norm transformer block, cut where cache policies reach in: `project`, then attention, then `finish`."""

    def __init__(
        self,
        *,
        model_size: int,
        heads: int,
        kv_heads: int,
        feed_forward: int,
        epsilon: float,
        bias: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        head_size = model_size // heads
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        self.attention_norm = RMSNorm(model_size, epsilon=epsilon, dtype=dtype)
        self.query = Linear(model_size, heads * head_size, bias=bias, dtype=dtype, rngs=rngs)
        self.key = Linear(model_size, kv_heads * head_size, bias=bias, dtype=dtype, rngs=rngs)
        self.value = Linear(model_size, kv_heads * head_size, bias=bias, dtype=dtype, rngs=rngs)
        self.output = Linear(heads * head_size, model_size, dtype=dtype, rngs=rngs)
        self.feed_forward_norm = RMSNorm(model_size, epsilon=epsilon, dtype=dtype)
        self.gate = Linear(model_size, feed_forward, dtype=dtype, rngs=rngs)
        self.up = Linear(model_size, feed_forward, dtype=dtype, rngs=rngs)
        self.down = Linear(feed_forward, model_size, dtype=dtype, rngs=rngs)

    def project(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries `[..., R, H, A]`, keys, values `[..., R, Hkv, A]` of layer inputs `[..., R, D]`, not yet rotated."""
        x = self.normalize(hidden)
        split = lambda y, heads: y.reshape(*y.shape[:-1], heads, self.head_size)
        return split(self.query(x), self.heads), split(self.key(x), self.kv_heads), split(self.value(x), self.kv_heads)

    def normalize(self, hidden: jax.Array) -> jax.Array:
        """What the projections see of layer inputs `[..., R, D]`."""
        return self.attention_norm(hidden)

    def attention_output(self, attended: jax.Array) -> jax.Array:
        """What attention adds to the residual stream, `[..., R, D]`, from attended values `[..., R, H, A]`."""
        return self.output(attended.reshape(*attended.shape[:-2], -1))

    def feed_forward(self, hidden: jax.Array) -> jax.Array:
        """What the gated feed-forward part adds to a residual stream `[..., R, D]` that has the attention output."""
        x = self.feed_forward_norm(hidden)
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))

    def finish(self, hidden: jax.Array, attended: jax.Array) -> jax.Array:
        """Layer outputs `[..., R, D]` from layer inputs and attended values `[..., R, H, A]`."""
        hidden = hidden + self.attention_output(attended)
        return hidden + self.feed_forward(hidden)
