"""What forwards of every kind cost in time here, and what a method's state takes in bytes for any model's shapes."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from polestar_jax import make_decode, pad_prompts
from polestar_jax.types import Method, Model


def time_kinds(
    model: Model, params: Any, method: Method, prompts: Sequence[list[int]], gen_length: int
) -> list[dict[str, Any]]:
    """Median milliseconds per layer of every kind of forward in decodes of `prompts`, the LM head included."""
    decode = make_decode(model, method, gen_length=gen_length)
    seconds: dict[str, list[float]] = {}
    length = max(map(len, prompts))
    state = decode.init(jax.random.split(jax.random.key(0), 1), length)
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first one compiles
        state = decode.start(state, pad_prompts([prompt], length))
        while not bool(decode.finished(state)[0]):
            began = time.perf_counter()
            state, log = jax.block_until_ready(decode.step(params, state))
            if number:
                seconds.setdefault(decode.kinds[int(log.kind[0])], []).append(time.perf_counter() - began)
    layers = model.config.layers
    return [
        {
            "method": method.name,
            "kind": kind,
            "ms_per_layer": 1000 * float(np.median(times)) / layers,
            "count": len(times),
        }
        for kind, times in sorted(seconds.items())
    ]


def state_bytes(model: Model, method: Method, prompt_length: int, gen_length: int) -> dict[str, int]:
    """Bytes of the parts of a decode's state, from shapes alone."""
    decode = make_decode(model, method, gen_length=gen_length)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    state = jax.eval_shape(lambda keys: decode.init(keys, prompt_length), keys)
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "size"))
    cache = state.cache
    parts = {"canvas, rule and log": size((state.canvas, state.rule, state.log))}
    if hasattr(cache, "keys"):
        parts["keys and values"] = size((cache.keys, cache.values))
        if hasattr(cache, "windows"):
            parts["window: codes, centroids, proxies"] = size(cache.windows)
        parts["other cache state"] = size(cache) - size((cache.keys, cache.values, getattr(cache, "windows", ())))
    return parts
