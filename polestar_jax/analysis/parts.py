"""Figure 12: what the parts of Polestar's forwards cost per layer, each compiled and timed by itself."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polestar_jax.attention import attention_scores, unrotated, weigh_values
from polestar_jax.cluster import PREFIX, SUFFIX, spherical_kmeans
from polestar_jax.drift import drift, log_attention
from polestar_jax.quantize import dequantize
from polestar_jax.types import Model
from polestar_jax.window import encode

_CLUSTERS, _ITERATIONS, _FORMAT = 8, 5, "nvfp4"


def time_parts(
    model: Model, params: Any, length: int, block_length: int, window: tuple[int, int] = (2, 1), repeats: int = 40
) -> list[dict[str, Any]]:
    """Median milliseconds of the parts of one layer, batch 1, on embeddings.

    What a compiled forward fuses or overlaps is not seen here: parts may add up to more than their forward.

    Args:
      model, params: of any family.
      length: N, positions of the canvas.
      block_length: S.
      window: blocks before and after the block.
      repeats: of every part, after one that compiles.

    Returns:
      rows of `forward` ("full entry", "step", "refresh"), `part` and `ms`. A refresh computes half of the window.
    """
    before, after = (blocks * block_length for blocks in window)
    width = before + after
    hidden = lambda rows: model.embed(params, jnp.arange(rows, dtype=jnp.int32)[None] % model.config.vocab_size)
    everyone = jnp.ones((1, length), bool)

    position = jnp.arange(length, dtype=jnp.int32)[None]

    def attend(params: Any, rows: jax.Array, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        query, _, _ = model.project(params, 0, rows)
        query = model.rotate(query, position[:, : rows.shape[1]])
        scores = attention_scores(query, keys, everyone)
        return weigh_values(jax.nn.softmax(scores, axis=-1), values), scores

    def proxy_drift(params: Any, centroids: jax.Array, keys: jax.Array, reference: jax.Array) -> jax.Array:
        query, _, _ = model.project(params, 0, centroids)
        plain = unrotated(model, keys, position)
        return drift(log_attention(attention_scores(query, plain, everyone), False), reference)

    def cluster(params: Any, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        region = jnp.where(jnp.arange(width) < before, PREFIX, SUFFIX)
        found = spherical_kmeans(rows[0].astype(jnp.float32), region, _CLUSTERS, _ITERATIONS)
        return found.centroids, found.labels

    _, key_rows, value_rows = model.project(params, 0, hidden(length))
    keys, values = key_rows.swapaxes(1, 2), value_rows.swapaxes(1, 2)
    attended, scores = jax.jit(attend)(params, hidden(length), keys, values)
    centroids, labels = jax.jit(cluster)(params, hidden(width))
    code = lambda params, rows: encode(rows, centroids[None], labels[None], _FORMAT, False)
    recode = lambda params, codes: code(params, dequantize(codes, _FORMAT))
    codes = code(params, hidden(width))
    finish = lambda params, rows, mixed: model.finish(params, 0, rows, mixed)

    def milliseconds(run: Callable[..., Any], *inputs: Any) -> float:
        compiled = jax.jit(run)
        jax.block_until_ready(compiled(params, *inputs))
        spent = []
        for _ in range(repeats):
            began = time.perf_counter()
            jax.block_until_ready(compiled(params, *inputs))
            spent.append(time.perf_counter() - began)
        return 1000 * float(np.median(spent))

    attention = lambda rows: milliseconds(attend, hidden(rows), keys, values)
    forward = lambda rows: milliseconds(finish, hidden(rows), attended[:, :rows])
    block = {"attention": attention(block_length), "feed-forward": forward(block_length)}
    half = width // 2
    proxies = (centroids[None].astype(keys.dtype), keys, log_attention(scores[:, :, :_CLUSTERS], False))
    parts = {
        "full entry": {
            "attention": attention(length),
            "feed-forward": forward(length),
            "k-means": milliseconds(cluster, hidden(width)),
            "coding": milliseconds(code, hidden(width)),
        },
        "step": block,
        "refresh": block
        | {
            "drift of proxies": milliseconds(proxy_drift, *proxies),
            "decoding and coding": milliseconds(recode, codes),
            "selected rows": attention(half) + forward(half),
        },
    }
    return [{"forward": kind, "part": part, "ms": ms} for kind, found in parts.items() for part, ms in found.items()]
