"""What forwards of every kind cost in time here; and from any model's shapes, what a method's state takes in bytes and
the least that a forward of a kind has to move and to multiply."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from polestar_jax import make_decode, pad_prompts
from polestar_jax.block_cache import BlockCache
from polestar_jax.no_cache import NoCache
from polestar_jax.polestar_cache import PolestarCache
from polestar_jax.types import Method, Model

KEYS_VALUES, WINDOW, OTHER = "keys and values", "window: codes, centroids, proxies", "other cache state"
_PROJECTIONS = ("query", "key", "value")


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
    state = _state_of(model, method, prompt_length, gen_length)
    cache = state.cache
    parts = {"canvas, rule and log": _bytes_of((state.canvas, state.rule, state.log))}
    if hasattr(cache, "keys"):
        parts[KEYS_VALUES] = _bytes_of((cache.keys, cache.values))
        if hasattr(cache, "windows"):
            parts[WINDOW] = _bytes_of(cache.windows)
        parts[OTHER] = _bytes_of(cache) - _bytes_of((cache.keys, cache.values, getattr(cache, "windows", ())))
    return parts


def host_bytes(model: Model, method: Method, prompt_length: int, gen_length: int) -> int:
    """Bytes of the state that lie in host memory, from shapes alone: the window's codes where they are offloaded."""
    if getattr(method.cache, "offload", "none") == "none":
        return 0
    state = _state_of(model, method, prompt_length, gen_length)
    return _bytes_of(state.cache.windows.codes)


class Work(NamedTuple):
    """The least that one forward has to do.

    Attributes:
      bytes: read from and written to device memory.
      operations: floating-point, of products of matrices; an addition and a multiplication are two.
    """

    bytes: int
    operations: int

    def seconds(self, ceiling: "Ceiling") -> float:
        """The time that a GPU cannot go below: its roofline."""
        return max(self.bytes / ceiling.bandwidth, self.operations / ceiling.operations)


class Ceiling(NamedTuple):
    """What a GPU does at most: bytes per second of its memory, bfloat16 operations per second of its tensor cores."""

    bandwidth: float
    operations: float


CEILINGS = {
    "a100": Ceiling(2.039e12, 312e12),
    "h100": Ceiling(3.35e12, 989.4e12),
    "h200": Ceiling(4.8e12, 989.4e12),
    "l4": Ceiling(0.3e12, 121e12),
}
"""By the makers' data sheets: A100 80GB SXM, H100 SXM, H200 SXM, L4; bfloat16 without sparsity."""


def forward_work(model: Model, method: Method, prompt_length: int, gen_length: int) -> dict[str, Work]:
    """The least work of every kind of forward at batch 1, of methods without a cache, of dual caches and of Polestar.

    Every weight but the embedding is read once. Where there is a cache, a forward over the whole canvas writes it,
    every other one reads it and writes its rows. What else a cache policy keeps is read and written by every forward;
    the window by refreshes, and written by entries. Activations, logits and the canvas are not counted: most of them
    can stay on the chip. Of a refresh's row sets the smallest is taken.

    Returns:
      kind -> work; empty for other methods.
    """
    decode = make_decode(model, method, gen_length=gen_length)
    spec, config, params, policy = decode.spec(1, prompt_length), model.config, model.abstract_params(), method.cache
    block, whole = spec.span + model.shift, spec.length
    # Rows that are projected to queries, keys and values, and rows that pass the rest of a layer.
    rows = {"full": (whole, whole), "entry": (whole, whole), "full entry": (whole, whole), "step": (block, block)}
    proxies = 0
    if isinstance(policy, PolestarCache):
        window, proxies = sum(policy.window(spec)), policy.clusters
        rows["window entry"] = (block + window, block + window)
        rows["refresh"] = (proxies + block + window, block + max(1, round(policy.capacities[0] * window)))
    elif not isinstance(policy, NoCache) and not (isinstance(policy, BlockCache) and policy.mode == "dual"):
        return {}
    if method.guidance is not None:
        return {}
    parts = state_bytes(model, method, prompt_length, gen_length)
    keys_values, windows, other = (parts.get(name, 0) for name in (KEYS_VALUES, WINDOW, OTHER))
    weights = _bytes_of(params) - (0 if getattr(config, "tied", False) else _bytes_of(params["embedding"]))
    projections = sum(layer[name]["weight"].size for layer in params["layers"].values() for name in _PROJECTIONS)
    rest = sum(leaf.size for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim == 2) - projections
    scores = 2 * config.layers * whole * config.model_size  # operations for those of one row
    found = {}
    for kind in decode.kinds:
        projected, finished = rows[kind]
        moved = weights + 2 * other + (keys_values if finished == whole else keys_values * (whole + finished) // whole)
        operations = 2 * (projected * projections + finished * rest + block * config.vocab_size * config.model_size)
        operations += 2 * finished * scores  # and their values
        if kind == "refresh":
            moved, operations = moved + 2 * windows, operations + proxies * scores
        elif kind.endswith("entry"):
            moved += windows
        found[kind] = Work(moved, operations)
    return found


def _state_of(model: Model, method: Method, prompt_length: int, gen_length: int) -> Any:
    decode = make_decode(model, method, gen_length=gen_length)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    return jax.eval_shape(lambda keys: decode.init(keys, prompt_length), keys)


def _bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "size"))
