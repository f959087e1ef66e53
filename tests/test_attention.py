"""Attention in turns is attention, and a look at it sees every row."""

import jax
import jax.numpy as jnp
import numpy as np

from polestar_jax.attention import CHUNK, attend, attention_scores, head_mean, weigh_values


def test_attention_in_turns_and_what_is_kept_of_it():
    batch, rows, keys, heads, kv_heads, size = 2, CHUNK + 3, 7, 4, 2, 4
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    query, key = draw(0, batch, rows, heads, size), draw(1, batch, kv_heads, keys, size)
    value, mask = draw(2, batch, kv_heads, keys, size), jnp.arange(keys)[None] < jnp.array([[4], [7]])
    probability = jax.nn.softmax(attention_scores(query, key, mask), axis=-1)
    attended, seen = attend(query, key, value, mask, head_mean)
    np.testing.assert_allclose(attended, weigh_values(probability, value), atol=1e-6)
    np.testing.assert_allclose(seen, np.asarray(probability).mean(axis=1), atol=1e-6)
    assert seen.shape == (batch, rows, keys) and not np.asarray(seen)[0, :, 4:].any()
    assert attend(query, key, value, mask)[1] is None
