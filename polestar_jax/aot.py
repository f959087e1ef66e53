"""Compiles a whole decode for a GPU on a machine that has none, and reads the plan.

Needs the CUDA wheels of jax (`uv sync --extra cuda13`), but no driver and no GPU. Import it before jax is used.
"""

import dataclasses
import functools
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polestar_jax.decode import GPU_OPTIONS, Decode, lower_decode
from polestar_jax.hlo import Program, copies_of, parse

# Read when jax starts its first backend; without it the CUDA plugin looks for a driver, and finds none.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

TARGETS = Path(__file__).parent / "targets"
GPUS = tuple(sorted(path.stem for path in TARGETS.glob("*.txtpb")))

_HLO_TYPES = {"bfloat16": "bf16", "float32": "f32"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the compiler says of a decode.

    Attributes:
      gpu: the target.
      weights, state, temporaries, unaliased, total: bytes on the device: arguments (parameters; the state with its
        cache, prompt and numbers), scratch, outputs that do not reuse an argument, and all of it.
      host: bytes in host memory, all of these together.
      lower_seconds, compile_seconds: on this machine.
      kernels, transfers, beside: kind of forward -> device operations in one, of its longest path; copies to and from
        host memory; those of the copies that run beside a product or a kernel of ours.
      layers: L, for kernels per layer.
      copied_weights: instructions that yield an array of a weight's shape, which should be none.
    """

    gpu: str
    weights: int
    state: int
    temporaries: int
    unaliased: int
    total: int
    host: int
    lower_seconds: float
    compile_seconds: float
    kernels: dict[str, int]
    transfers: dict[str, int]
    beside: dict[str, int]
    layers: int
    copied_weights: list[str]


def check_toolchain() -> None:
    """Raises ImportError, with the remedy, if jax cannot compile for CUDA here."""
    if not any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin")):
        raise ImportError(
            "compiling for a GPU needs jax's CUDA wheels (no GPU is needed): uv sync --extra cuda13,"
            " or pip install 'polestar-jax[cuda13]'"
        )


@functools.cache
def make_mesh(gpu: str) -> Mesh:
    """One device of a GPU, to compile for.

    Raises:
      ValueError: if the GPU is not one of `GPUS`.
      ImportError: if the CUDA wheels are missing.
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu={gpu!r} must be one of {', '.join(GPUS)}")
    check_toolchain()
    jax.devices()  # the topology needs an initialised backend
    target = (TARGETS / f"{gpu}.txtpb").read_text()
    topology = topologies.get_topology_desc(gpu, platform="cuda", target_config=target, topology="1x1x1")
    return Mesh(np.array(topology.devices).reshape(-1), ("device",))


def compile_for(gpu: str, function: Callable[..., Any], *shapes: Any) -> jax.stages.Compiled:
    """Compiles a function for one GPU, from the shapes of its arguments; raises as `make_mesh`."""
    mesh = make_mesh(gpu)
    place = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*placed).compile()


def compile_plan(decode: Decode, gpu: str, prompt_length: int, batch: int = 1) -> Plan:
    """Compiles `decode` for one GPU.

    Args:
      decode: of any model; its weights are never made.
      gpu: one of `GPUS`.
      prompt_length, batch: P, B.

    Raises:
      ValueError: if the GPU is unknown.
      ImportError: if the CUDA wheels are missing.
    """
    mesh = make_mesh(gpu)
    place = NamedSharding(mesh, PartitionSpec())
    params = decode.model.abstract_params()
    with jax.set_mesh(mesh):
        begin = time.perf_counter()
        lowered = lower_decode(decode, params, prompt_length, batch, place)
        lowering = time.perf_counter() - begin
        begin = time.perf_counter()
        compiled = lowered.compile(compiler_options=GPU_OPTIONS)
        compiling = time.perf_counter() - begin
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "XLA for GPUs always has both"
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    unaliased = memory.output_size_in_bytes - memory.alias_size_in_bytes
    program = parse(text)
    each = lambda count: dict(zip(decode.kinds, map(count, program.decode_branches()), strict=True))
    return Plan(
        gpu=gpu,
        weights=weights,
        state=memory.argument_size_in_bytes - weights,
        temporaries=memory.temp_size_in_bytes,
        unaliased=unaliased,
        total=memory.argument_size_in_bytes + memory.temp_size_in_bytes + unaliased,
        host=memory.host_argument_size_in_bytes
        + memory.host_temp_size_in_bytes
        + memory.host_output_size_in_bytes
        - memory.host_alias_size_in_bytes,
        lower_seconds=lowering,
        compile_seconds=compiling,
        kernels=each(program.kernels),
        transfers=each(program.transfers),
        beside=each(program.transfers_beside),
        layers=decode.model.config.layers,
        copied_weights=copied_weights(program, params),
    )


def copied_weights(program: Program, params: Any) -> list[str]:
    """Names of the instructions that yield an array of a matrix's shape, in either orientation.

    Args:
      program: a compiled decode.
      params: its parameters, or their shapes.
    """
    shapes = set()
    for leaf in jax.tree.leaves(params):
        if leaf.ndim == 2:
            kind = _HLO_TYPES[jnp.dtype(leaf.dtype).name]
            rows, columns = leaf.shape
            shapes |= {f"{kind}[{rows},{columns}]", f"{kind}[{columns},{rows}]", f"{kind}[1,{rows},{columns}]"}
    return [f"{each.opcode} {each.name}: {each.shape}" for each in copies_of(program, shapes)]
