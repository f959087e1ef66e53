"""Why parameters and caches are one tree per layer: one 32-row step, unrolled and as `lax.scan` over stacked arrays.

    python benchmarks/stacked_layers.py [--shape medium] [--rounds 20]

The two run in turn on the same values, and must give the same hidden states. `lax.scan` copies a layer's weights and
caches out of the stack before it uses them.
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from models.transformer import Config, Transformer
from polestar_jax.attention import attend, empty_cache, project_rows, write_cache
from polestar_jax.benchmark import SHAPES
from polestar_jax.environment import describe_environment, format_environment
from polestar_jax.rows import embed_rows, forward_rows
from polestar_jax.types import Canvas, RowSet, Spec


def make_step(spec: Spec, canvas: Canvas, rows: RowSet):
    """The step as the library runs it: `(params, keys, values) -> hidden, keys, values`."""

    def step(params, keys, values):
        ran = forward_rows(spec, params, keys, values, canvas, rows, canvas.valid)
        return ran.output, ran.keys, ran.values

    return jax.jit(step, donate_argnums=(1, 2))


def make_stacked_step(spec: Spec, canvas: Canvas, rows: RowSet):
    """The same with layers stacked on axis 0 of every leaf, keys and values too."""
    one = Transformer(dataclasses.replace(spec.model.config, layers=1))

    def step(params, keys, values):
        def layer_step(hidden, layer):
            weights, key_cache, value_cache = layer
            single = params | {"layers": {0: weights}}
            query, key, value = project_rows(one, single, 0, hidden, rows.position)
            key_cache, value_cache = write_cache(key_cache, rows, key), write_cache(value_cache, rows, value)
            attended, _ = attend(query, key_cache, value_cache, canvas.valid)
            return one.finish(single, 0, hidden, attended), (key_cache, value_cache)

        hidden = embed_rows(one, params, canvas, rows)
        hidden, (keys, values) = jax.lax.scan(layer_step, hidden, (params["layers"], keys, values))
        return hidden, keys, values

    return jax.jit(step, donate_argnums=(1, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="medium")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    model = Transformer(Config(family="llada", **shape.model))
    params = model.init(jax.random.key(0))
    spec = Spec(model, 1, shape.prompt_length, shape.gen_length, shape.block_length, frozenset())
    tokens = jax.random.randint(jax.random.key(1), (1, spec.length), 0, model.config.eos_id, jnp.int32)
    everything = jnp.ones(tokens.shape, bool)
    place = jnp.arange(spec.length, dtype=jnp.int32)[None]
    canvas = Canvas(tokens, ~everything, everything, place)
    block = place[:, shape.prompt_length : shape.prompt_length + shape.block_length]
    there = jnp.ones(block.shape, bool)
    rows = RowSet(block, jnp.take_along_axis(tokens, block, axis=1), block, there, there)

    stack = lambda *leaves: jnp.stack(leaves)
    stacked = params | {"layers": jax.tree.map(stack, *params["layers"].values())}
    cache = lambda key: jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(key), leaf.shape), empty_cache(spec))
    runs = {
        "one tree per layer": [make_step(spec, canvas, rows), params, cache(2), cache(3)],
        "scan over stacked": [make_stacked_step(spec, canvas, rows), stacked, stack(*cache(2)), stack(*cache(3))],
    }
    milliseconds = {name: [] for name in runs}
    results = {}
    for _ in range(options.rounds + 1):
        for name, run in runs.items():
            step, weights, keys, values = run
            begin = time.perf_counter()
            hidden, run[2], run[3] = jax.block_until_ready(step(weights, keys, values))
            milliseconds[name].append(1e3 * (time.perf_counter() - begin))
            results[name] = hidden
    np.testing.assert_allclose(*results.values(), rtol=1e-3, atol=1e-3)
    medians = {name: np.median(times[1:]) for name, times in milliseconds.items()}
    for name, median in medians.items():
        print(f"{name:20} {median:7.1f} ms (least {min(milliseconds[name][1:]):.1f})")
    ours, theirs = medians.values()
    print(f"ratio {ours / theirs:.2f}; {options.shape}, {shape.block_length} rows, cache of {spec.length}")
    print(format_environment(describe_environment(dtype=model.config.dtype)))


if __name__ == "__main__":
    main()
