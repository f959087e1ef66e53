"""Initial parameters of the embedded checkpoint: random, with some heads that already look at fixed distances.

A model this small spends most of a short run finding out how to attend to "the word before" or "the same place in the
line above". Here every embedding starts with one shared direction, and the queries and keys of some heads turn it into
the rotary phases whose product peaks at a given distance. Training is free to change all of it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from models.transformer import Params, Transformer

_DISTANCES = ((-1, 1, -2, -3), (-4, -8, -7, -9), (-8, -2, -1))  # by layer and head; lines of a list are 8 words apart
_FREQUENCIES = 9  # the fastest of a head, which tell near places apart
_GAIN = 4.0
_SPREAD = 0.5  # of the embeddings, around a shared vector with entries of about this size


def make_params(model: Transformer, seed: int) -> Params:
    """Initial parameters for training."""
    params = model.init(jax.random.key(seed))
    source = np.random.default_rng(seed)
    size, heads = model.config.model_size, model.config.heads
    shared = source.normal(size=size)
    shared /= np.linalg.norm(shared)
    embedding = _SPREAD * (source.normal(size=params["embedding"].shape) + np.sqrt(size) * shared)
    params["embedding"] = jnp.asarray(embedding, jnp.float32)
    half = size // heads // 2
    frequency = model.config.rope_theta ** (-np.arange(half) / half)
    amplitude = _GAIN * (np.arange(half) < _FREQUENCIES)
    reader = shared / np.sqrt(size / 2)  # gives 1 on the shared half of a normalised embedding
    for layer, weights in params["layers"].items():
        query, key = 0.5 * np.array(weights["query"]["weight"]), 0.5 * np.array(weights["key"]["weight"])
        planted = _DISTANCES[layer][:heads] if layer < len(_DISTANCES) else ()
        rows_of = lambda head: slice(head * 2 * half, (head + 1) * 2 * half)
        for head, distance in enumerate(planted):
            turns = frequency * (distance + model.shift)  # distances are from the position that a row predicts
            query[rows_of(head)] += np.outer((amplitude * np.array([np.cos(turns), np.sin(turns)])).ravel(), reader)
        for head in {head * model.config.kv_heads // heads for head in range(len(planted))}:
            key[rows_of(head)] += np.outer(np.concatenate([amplitude, 0 * amplitude]), reader)
        weights["query"]["weight"], weights["key"]["weight"] = jnp.asarray(query), jnp.asarray(key)
        for name in ("output", "down"):  # layers start small beside the embedding
            weights[name]["weight"] *= 0.3
    return params
