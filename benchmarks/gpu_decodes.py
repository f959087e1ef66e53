"""A part of `gpu_check.py`: whole decodes on random weights, at the tokens per forward that the paper reports.

One program per part is compiled, the whole decode. How long a forward of each kind takes is found by decoding with
other numbers, which need no other program: never a refresh, a refresh in every step, entries of one kind, more
forwards. The kinds' times are then those that explain the decodes' best.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import Save, timed

from models.transformer import Config, Transformer
from polestar_jax import methods
from polestar_jax.analysis.costs import forward_work
from polestar_jax.benchmark import PAPER_TPF, SHAPES, Shape, prepare
from polestar_jax.decode import Decode
from polestar_jax.offload import fetch, store
from polestar_jax.quantize import Codes
from polestar_jax.types import Method

SEED = 0


def shape_of(rehearse: bool, layers: int | None = None) -> tuple[Transformer, Shape]:
    """LLaDA-8B as the paper decodes it, or a tiny one."""
    shape = SHAPES["tiny" if rehearse else "llada-8b"]
    config = Config(family="llada", **shape.model)
    layers = 1 if rehearse else layers
    return Transformer(config if layers is None else dataclasses.replace(config, layers=layers)), shape


def make_method(name: str, shape: Shape, offload: str, **numbers: float) -> Method:
    extra = {"offload": offload} if offload != "none" else {}
    return getattr(methods, name)(block_length=shape.block_length, **extra, **numbers)


def variants(name: str, shape: Shape, offload: str, kernels: str | None, model: Transformer) -> Iterator[Any]:
    """(label, decode) pairs of one program: as the paper has it, and with other numbers."""
    tpf = PAPER_TPF[name]
    # Vanilla's forwards are all alike: some tell what 256 would take.
    usual, other = (8.0, 16.0) if name == "vanilla" else (tpf, 1.0)
    runs: list[tuple[str, float, dict[str, float]]] = [("paper", usual, {}), ("other commits", other, {})]
    if name == "polestar":
        runs.append(("no refresh", tpf, {"update_threshold": float("inf")}))
        runs.append(("every step a refresh", tpf, {"update_threshold": 0.0}))
        runs.append(("window entries", tpf, {"window_entry_period": 1.0}))
        runs.append(("full entries", tpf, {"window_entry_period": 0.0}))
    for label, mean, numbers in runs:
        method = make_method(name, shape, offload, **numbers)
        yield label, prepare(model, shape, label, method, mean, SEED, kernels).decode


def make_params(model: Transformer) -> Any:
    """Random parameters, made on the device one by one, the largest first: the device's peak is then the decode's."""
    leaves, tree = jax.tree.flatten(model.abstract_params())
    order = sorted(range(len(leaves)), key=lambda index: -leaves[index].size)
    for index in order:
        shape, dtype = leaves[index].shape, leaves[index].dtype
        leaves[index] = _fill(jax.random.fold_in(jax.random.key(SEED), index), shape, dtype.name)
        if leaves[index].size > 2**28:
            jax.block_until_ready(leaves[index])
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _fill(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    # Norms are vectors.
    return jnp.ones(shape, dtype) if len(shape) == 1 else shape[-1] ** -0.5 * jax.random.normal(key, shape, dtype)


def measure(name: str, kernels: str | None, offload: str, rehearse: bool, save: Save) -> None:
    """Times whole decodes of one method; saves after every round."""
    model, shape = shape_of(rehearse)
    results: dict[str, Any] = {"method": name, "kernels": kernels or "the best that works here", "offload": offload}
    begin = time.perf_counter()
    params = jax.block_until_ready(make_params(model))
    results["seconds making weights"] = time.perf_counter() - begin
    results["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(params))
    results["dtype"] = model.config.dtype
    results["peak bytes, making weights"] = peak_bytes()
    save(results)
    prompt = np.random.default_rng(SEED).integers(0, model.config.eos_id, (1, shape.prompt_length))
    decodes = dict(variants(name, shape, offload, kernels, model))
    first = decodes["paper"]
    state = first.init(jax.random.split(jax.random.key(SEED), 1), shape.prompt_length)
    runs: dict[str, Any] = {label: {"seconds": []} for label in decodes}
    rounds = 1 if rehearse else 5
    for number in range(rounds + 1):
        for label, decode in decodes.items():
            begin = time.perf_counter()
            output, state = jax.block_until_ready(decode(params, state, prompt))
            seconds = time.perf_counter() - begin
            if not number:
                if label == "paper":
                    results["seconds to the end of the first decode, compilation included"] = seconds
                runs[label] |= describe(decode, output)
            else:
                runs[label]["seconds"].append(seconds)
            if not number and label == "paper":
                results["peak bytes"] = peak_bytes()
                save(results)
        if number:
            results |= summarise(name, shape, runs, first)
            save(results)
            print(f"  round {number}: {results['tps']:.1f} tokens per second", flush=True)
    least = forward_work(model, make_method(name, shape, offload), shape.prompt_length, shape.gen_length)
    results["least"] = {kind: work._asdict() for kind, work in least.items()}
    results["layers"] = model.config.layers
    save(results)
    if offload != "none":
        results["copies"] = time_copies(state.cache.windows.codes, 1 if rehearse else 20)
        save(results)


def describe(decode: Decode, output: Any) -> dict[str, Any]:
    """Forwards of a decode by kind, rows per forward, and what tells whether its numbers are sound."""
    kinds, ran = np.asarray(output.log.kind[0]), int(output.forwards[0])
    named = [decode.kinds[kind] for kind in kinds[:ran]]
    assert bool(output.filled.all()), "the replayed commits ended early"
    drift = np.asarray(output.log.drift)
    return {
        "tokens": np.asarray(output.tokens[0]).tolist(),
        # NaN where there was nothing to measure.
        "drift is finite": bool(np.isfinite(drift).any() and not np.isinf(drift).any()) if drift.size else None,
        "forwards": ran,
        "kinds": {kind: named.count(kind) for kind in decode.kinds},
        "rows": float(np.mean(output.log.rows[0, :ran])),
        "rows_executed": float(np.mean(output.log.rows_executed[0, :ran])),
    }


def summarise(name: str, shape: Shape, runs: dict[str, Any], decode: Decode) -> dict[str, Any]:
    """Tokens per second at the paper's tokens per forward, and ms of every kind of forward."""
    seconds = {label: float(np.median(run["seconds"])) for label, run in runs.items()}
    counts = np.array([[run["kinds"][kind] for kind in decode.kinds] for run in runs.values()], float)
    found, *_ = np.linalg.lstsq(counts, np.array(list(seconds.values())), rcond=None)
    misfit = np.max(np.abs(counts @ found / np.array(list(seconds.values())) - 1))
    forwards = runs["paper"]["forwards"]
    # The paper's vanilla commits one token per forward.
    whole = seconds["paper"] * (shape.gen_length / PAPER_TPF[name] / forwards if name == "vanilla" else 1)
    return {
        "tps": shape.gen_length / whole,
        "scaled": name == "vanilla",
        "positions per forward": PAPER_TPF[name] if name == "vanilla" else shape.gen_length / forwards,
        "ms": dict(zip(decode.kinds, (1e3 * found).tolist(), strict=True)),
        "largest misfit of a decode": float(misfit),
        "runs": runs,
    }


def peak_bytes() -> int | None:
    """What the device's memory held at most since this process began; None where it does not say."""
    stats = jax.devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def time_copies(codes: tuple[Codes, ...], repeat: int) -> dict[str, float]:
    """ms of nothing but bringing all layers' codes to the device, and of storing them again."""
    bring = jax.jit(lambda codes: [fetch("host", layer) for layer in codes])
    put = jax.jit(lambda codes: [store("host", layer) for layer in codes])
    median = lambda run, codes: 1e3 * float(np.median(timed(run, codes, repeat=repeat)))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(codes))
    return {"bytes": size, "to device": median(bring, codes), "to host": median(put, bring(codes))}


def programs(kernels: str | None, layers: int) -> Iterator[tuple[str, Decode, int]]:
    """What the parts compile: a name, a decode, its prompt length."""
    model, shape = shape_of(False, layers)
    for name, chosen, offload in PARTS:
        if chosen is None or chosen == "xla" or chosen == kernels:
            _, decode = next(variants(name, shape, offload, chosen, model))
            yield label_of(name, chosen, offload), decode, shape.prompt_length


PARTS: tuple[tuple[str, str | None, str], ...] = (
    ("polestar", None, "none"),
    ("fast_dllm", None, "none"),
    ("polestar", "xla", "none"),
    ("vanilla", None, "none"),
    ("polestar", None, "host"),
    ("fast_dllm", "xla", "none"),
)
"""Method, kernels and offload of every decode that is timed, the most telling first."""


def label_of(name: str, kernels: str | None, offload: str) -> str:
    return " ".join(
        [name, "without kernels" if kernels == "xla" else "with kernels"] + ["offloaded"] * (offload != "none")
    )
