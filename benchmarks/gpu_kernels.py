"""A part of `gpu_check.py`: every kernel against its reference on the device, and its time beside its bytes."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import Save, timed

from pallas_kernels.arguments import OPS
from pallas_kernels.drift_attention import DriftReference
from pallas_kernels.implementation import capability
from pallas_kernels.shapes import REAL, TINY, Shape
from pallas_kernels.simulation import simulated

SETS_BYTES = 256e6  # of arguments to rotate among, so that the 50 MB of a Hopper's L2 cache do not hold them all
MOST_SETS = 24  # more make programs that take long to compile: the smallest ops stay in the cache
CACHE_BYTES = 120e6  # sets of less than this may be read from the L2 cache
RUN_BYTES = 60e9  # to move in one timed run
TOLERANCES = {
    "attention": {"attended, relative": 3e-2},
    "drift_attention": {"attended, relative": 3e-2, "drift": 5e-5, "scores": 1e-3, "log_sum": 1e-3},
    # Keys that are turned back fall between two bfloat16 and may be rounded to either.
    "proxy_drift": {"drift": 5e-2, "scores": 5e-2, "log_sum": 5e-2},
    "residual_nvfp4.quantize": {"differing bytes": 0},
    "residual_nvfp4.quantize, some kept": {"differing bytes": 0},
    "residual_nvfp4.gather": {"differing bytes": 0},
    "confident_argmax": {"rows with another word that is no tie": 0, "confidence, relative": 1e-2},
}
"""Op -> the largest differences from the reference that count as the same."""


IN_PLACE: dict[str, Callable[..., Any]] = {
    "proxy_drift": lambda arguments, before: (*arguments[:-1], before[-1]),
    "residual_nvfp4.quantize, some kept": lambda arguments, before: (*arguments[:3], (*before, arguments[3][2])),
}
"""Ops that write over what their last call found: a loop gives it back to them, or XLA would copy it first."""


def kernel_for_here() -> str | None:
    """The kernels that are for this GPU; None where XLA does all."""
    found = capability()
    if found is None:
        return None
    return "mosaic" if 90 <= found < 100 else "triton" if 80 <= found < 90 else None


def draw(op: str, shape: Shape, seed: int) -> tuple[Any, ...]:
    """Arguments of `op`, made on the device; old scores are those of a nearby look."""
    structs = OPS[op][1](shape)
    leaves, tree = jax.tree.flatten(structs)
    keys = jax.random.split(jax.random.key(seed), len(leaves) + 2)

    def fill(leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if leaf.dtype == jnp.bool_:
            return jax.random.bernoulli(key, 0.9, leaf.shape)
        if leaf.dtype == jnp.int32:  # labels, or chosen rows
            return jax.random.randint(key, leaf.shape, 0, min(shape.clusters, shape.window), jnp.int32)
        if leaf.dtype == jnp.uint8:  # E4M3's 127 and 255 are no numbers
            return jax.random.randint(key, leaf.shape, 0, 127, jnp.int32).astype(jnp.uint8)
        return jax.random.normal(key, leaf.shape, leaf.dtype)

    arguments = list(jax.tree.unflatten(tree, [fill(leaf, key) for leaf, key in zip(leaves, keys[2:], strict=True)]))
    if op == "residual_nvfp4.gather":  # any two codes, any row
        arguments[0] = jax.random.bits(keys[0], arguments[0].shape, jnp.uint8)
        arguments[4] = jax.random.randint(keys[1], arguments[4].shape, 0, shape.window, jnp.int32)
    if op == "confident_argmax":
        arguments[2] = arguments[2] * shape.model_size**-0.5
    if op == "proxy_drift":
        angle = 3 * arguments[2]
        arguments[2:4] = jnp.cos(angle), jnp.sin(angle)
    if op in ("attention", "drift_attention", "proxy_drift"):
        arguments[0] = 2 * arguments[0]
    if op in ("drift_attention", "proxy_drift"):
        before = arguments[0] + 0.3 * jax.random.normal(keys[0], arguments[0].shape, arguments[0].dtype)
        empty = DriftReference(*(jnp.zeros(leaf.shape, leaf.dtype) for leaf in structs[-1]))
        arguments[-1] = _reference(op)(before, *arguments[1:-1], empty)[-1]
    return tuple(arguments)


@functools.cache  # and with it what is compiled
def _reference(op: str) -> Callable[..., Any]:
    return jax.jit(functools.partial(OPS[op][0], implementation="xla"))


def differences(op: str, found: Any, expected: Any) -> dict[str, float]:
    """How far results are apart, by the names in `TOLERANCES`."""
    wide = lambda x: x.astype(jnp.float32)
    largest = lambda a, b: float(jnp.max(jnp.abs(wide(a) - wide(b))))
    norm = lambda x: jnp.linalg.norm(wide(x), axis=-1)
    # Of the row and head that is worst: an average would hide a tile that is wrong.
    relative = lambda a, b: {"attended, relative": float(jnp.max(norm(wide(a) - wide(b)) / norm(b)))}
    if op == "confident_argmax":
        (token, confidence), (word, probability) = found, expected
        apart = jnp.abs(confidence / probability - 1)
        return {
            "rows with another word that is no tie": int(jnp.sum((token != word) & (apart > 1e-3))),
            "rows with another word": int(jnp.sum(token != word)),
            "confidence, relative": float(jnp.max(apart)),
        }
    if op.startswith("residual_nvfp4"):
        bits = lambda tree: np.concatenate([np.asarray(leaf).view(np.uint8).ravel() for leaf in jax.tree.leaves(tree)])
        return {"differing bytes": int(np.sum(bits(found) != bits(expected)))}
    if op == "attention":
        return relative(found, expected)
    *_, drift, new = found
    *_, expected_drift, old = expected
    apart = {"drift": largest(drift, expected_drift), "log_sum": largest(new.log_sum, old.log_sum)}
    apart["scores"] = largest(new.scores, old.scores)
    return apart if op == "proxy_drift" else apart | relative(found[0], expected[0])


def is_within(op: str, found: dict[str, float]) -> bool:
    return all(found[name] <= most for name, most in TOLERANCES[op].items())  # not so for NaN


def least_bytes(op: str, shape: Shape) -> int:
    """Every argument read and every result written once."""
    call, make = OPS[op]
    moved = jax.tree.leaves((make(shape), jax.eval_shape(call, *make(shape))))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in moved)


def counts_for(least: int) -> tuple[int, int]:
    """How many sets of arguments to rotate among, and how many rounds over them to time."""
    sets = min(MOST_SETS, max(1, math.ceil(SETS_BYTES / least)))
    return sets, min(400, max(8, int(RUN_BYTES / (least * sets))))


def make_loop(op: str, implementation: str, rounds: int) -> Callable[..., Any]:
    """A program that runs an op on every set of arguments, `rounds` times, each time after the last one's results.

    One program, as an op takes less time than its dispatch. Nothing can be left out, moved out of the loop or merged
    with what comes next: what is known only at run time decides whether the smallest argument changes, which it never
    does. That is one more kernel beside each op, of a microsecond or two.
    """
    call = functools.partial(OPS[op][0], implementation=implementation)

    def tie(arguments: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(arguments)
        never = jax.tree.leaves(result)[0].reshape(-1)[0].astype(jnp.float32) > 1e30
        smallest = min(range(len(leaves)), key=lambda index: leaves[index].size * leaves[index].dtype.itemsize)
        least = leaves[smallest]
        leaves[smallest] = least ^ never if least.dtype == jnp.bool_ else least + never.astype(least.dtype)
        return jax.tree.unflatten(tree, leaves)

    def run(sets: tuple[Any, ...]) -> Any:
        def once(_, results):
            last, fresh = results[-1], []
            for arguments, before in zip(sets, results, strict=True):
                arguments = IN_PLACE.get(op, lambda arguments, before: arguments)(arguments, before)
                last = jax.lax.optimization_barrier(call(*tie(arguments, last)))
                fresh.append(last)
            return tuple(fresh)

        zeros = lambda arguments: jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(call, *arguments)
        )
        return jax.lax.fori_loop(0, rounds, once, tuple(zeros(arguments) for arguments in sets))

    return run


def cases(op: str, names: str, rehearse: bool) -> Iterator[tuple[str, str, Shape]]:
    """Op, name of a shape, shape: of shapes in the comma-separated `names`, by shape; of all ops for ""."""
    shapes = TINY if rehearse else REAL
    for name in names.split(","):
        for each in (op,) if op else OPS:
            yield each, name, shapes[name]


def measure(chosen: str, names: str, rehearse: bool, save: Save) -> None:
    """Checks and times an op, or all for "", at the shapes in `names`; saves what is known after every op."""
    kernel = "mosaic" if rehearse else kernel_for_here()
    results: dict[str, Any] = {"kernel": kernel, "cases": []}
    for op, name, shape in cases(chosen, names, rehearse):
        least = least_bytes(op, shape)
        sets, rounds = (1, 1) if rehearse else counts_for(least)
        case: dict[str, Any] = {"op": op, "shape": name, "bytes": least, "sets": sets, "rounds": rounds, "ms": {}}
        case["in cache"] = least * sets < CACHE_BYTES
        results["cases"].append(case)
        try:
            arguments = tuple(draw(op, shape, seed) for seed in range(sets))
            expected = _reference(op)(*arguments[0])
            if kernel is not None:
                with simulated("mosaic") if rehearse else contextlib.nullcontext():
                    run = jax.jit(functools.partial(OPS[op][0], implementation=kernel))
                    found = jax.block_until_ready(run(*arguments[0]))
                case["differences"] = differences(op, found, expected)
                case["same"] = is_within(op, case["differences"])
            for implementation in ("xla",) if kernel is None else (kernel, "xla"):
                program = jax.jit(make_loop(op, implementation, rounds))
                simulate = rehearse and implementation == kernel
                with simulated("mosaic") if simulate else contextlib.nullcontext():
                    seconds = timed(program, arguments, repeat=1 if rehearse else 5, warm=not simulate)
                case["ms"][implementation] = 1e3 * float(np.median(seconds)) / (sets * rounds)
        except Exception as error:  # the other ops and shapes are still worth measuring
            case["error"] = f"{type(error).__name__}: {error}"[:2000]
        print(f"  {op}, {name}: {case.get('error') or case['ms']}", flush=True)
        save(results)


def programs(names: str, kernel: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """What `measure` compiles of its kernels: a name, a function, and the shapes of its arguments."""
    for op, name, shape in cases("", names, rehearse=False):
        sets, rounds = counts_for(least_bytes(op, shape))
        yield f"{op}, {name}", make_loop(op, kernel, rounds), ((OPS[op][1](shape),) * sets,)
