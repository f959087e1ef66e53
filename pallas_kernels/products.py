"""Products of half-precision arrays with float32 sums, on every platform."""

import functools

import jax
import jax.numpy as jnp


def einsum32(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """float32 `einsum` of two arrays of one dtype. XLA for CPUs lacks some products of bfloat16, so it gets float32."""
    direct = functools.partial(jnp.einsum, subscripts, preferred_element_type=jnp.float32)
    if a.dtype == jnp.float32:
        return direct(a, b)
    wide = lambda a, b: direct(a.astype(jnp.float32), b.astype(jnp.float32))
    return jax.lax.platform_dependent(a, b, cpu=wide, default=direct)
