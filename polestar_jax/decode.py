"""`make_decode`: a model and a method as a jitted `decode(params, state, prompt)`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import ArrayLike

from pallas_kernels.implementation import Implementation
from polestar_jax.head import SIGNALS
from polestar_jax.loop import fresh_state, is_live, output_of, run, start, step
from polestar_jax.placement import check_mesh, check_places, mesh_of, put_rows_on_mesh
from polestar_jax.prompts import check_prompt
from polestar_jax.types import DecodeOutput, DecodeState, Method, Model, Prompt, Signal, Spec, StepLog


def make_decode(model: Model, method: Method, *, gen_length: int, kernels: Implementation | None = None) -> "Decode":
    """A decoder of `gen_length` tokens.

    Args:
      model: a model adapter such as `models.transformer.Transformer`.
      method: such as `polestar_jax.methods.polestar()`. Its numbers are arguments of the compiled program: a decode
        with other numbers reuses it.
      gen_length: G.
      kernels: "xla", or GPU kernels by name, "mosaic" (Hopper) or "triton" (Ampere, Ada); None takes the best that
        works. Where a named one cannot run, the first call raises ValueError.

    Raises:
      ValueError: listing everything about the method that does not fit, before anything is compiled.
    """
    if gen_length < 1:
        raise ValueError(f"gen_length={gen_length} must be at least 1")
    if kernels not in (None, *get_args(Implementation)):
        raise ValueError(f"{kernels=} must be None, 'xla', 'mosaic' or 'triton'")
    decode = Decode(model, jax.tree.map(_as_number, method), gen_length, kernels)
    spec = decode.spec(batch=1, prompt_length=1)
    parts = (method.schedule, method.cache, method.rule, method.sampler)
    problems = [problem for part in parts for problem in part.problems(spec)]
    if lacking := lacking_signals(method):
        problems.append(
            f"the commit rule {type(method.rule).__name__} needs {sorted(lacking)}, which the cache policy"
            f" {type(method.cache).__name__} does not measure"
        )
    if problems:
        raise ValueError(f"{method.name}: " + "; ".join(problems))
    return decode


def lacking_signals(method: Method) -> frozenset[Signal]:
    """What the parts of a method read and nobody measures."""
    return (method.rule.needs | method.cache.needs) - method.cache.provides - SIGNALS.keys()


def _as_number(leaf: Any) -> jax.Array:
    """Every number of a method as float32, so that 1 and 1.0 compile to the same program; arrays as they are."""
    return jnp.asarray(leaf, jnp.float32) if isinstance(leaf, (int, float)) else jnp.asarray(leaf)


@dataclasses.dataclass(frozen=True)
class Decode:
    """`output, state = decode(params, state, prompt)`; see `make_decode`.

    Attributes:
      model, method, gen_length, kernels: as given.
    """

    model: Model
    method: Method
    gen_length: int
    kernels: Implementation | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of forward, in the order in which `StepLog.kind` numbers them."""
        return tuple(branch.name for branch in self.method.cache.branches(self.spec(batch=1, prompt_length=1)))

    def spec(self, batch: int, prompt_length: int, mesh: Mesh | None = None) -> Spec:
        span = self.method.schedule.span(self.gen_length)
        needs = self.method.rule.needs | self.method.cache.needs
        return Spec(self.model, batch, prompt_length, self.gen_length, span, needs, mesh, self.kernels)

    def init(self, keys: jax.Array, prompt_length: int, *, mesh: Mesh | None = None) -> DecodeState:
        """All buffers of a decode, as one pytree.

        Args:
          keys: one random key per batch row, `[B]`, from `jax.random.split(jax.random.key(seed), B)`.
          prompt_length: P, pads included.
          mesh: with axes "data", over which the batch rows are spread, and "model", over which heads and feed-forward
            part are; the parameters must lie on it too (`polestar_jax.placement.param_shardings`). None is one device.

        Raises:
          ValueError: if P + G is beyond the trained context, `keys` is not a vector of keys, or the mesh does not
            divide the batch or the model.
        """
        if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.ndim != 1:
            raise ValueError(
                f"keys must be a vector of typed keys, one per batch row, not {keys.dtype}{list(keys.shape)};"
                " use jax.random.split(jax.random.key(seed), batch)"
            )
        if prompt_length < 1:
            raise ValueError(f"prompt_length={prompt_length} must be at least 1: an empty prompt cannot be decoded")
        limit = self.model.config.max_length
        if prompt_length + self.gen_length > limit:
            raise ValueError(
                f"prompt_length={prompt_length} + gen_length={self.gen_length} is beyond the model's trained context of"
                f" {limit}; shorten one of them"
            )
        mesh = mesh if mesh is None else check_mesh(self.model, mesh, keys.shape[0])
        # A copy: the state is donated, and the caller's keys are not ours to delete.
        return _init(self.spec(keys.shape[0], prompt_length, mesh), self.method, keys.copy())

    def __call__(self, params: Any, state: DecodeState, prompt: Prompt | ArrayLike) -> tuple[DecodeOutput, DecodeState]:
        """Decodes `prompt` (`Prompt`, or int32 `[B, P]`) to the end. `state` is donated: use the one returned."""
        spec = self._spec_of(state)
        check_places(params, spec.mesh)
        run = _best(state, _decode, _decode_on_gpu)
        return run(spec, self.method, params, state, put_rows_on_mesh(spec, check_prompt(spec, prompt)))

    def start(self, state: DecodeState, prompt: Prompt | ArrayLike) -> DecodeState:
        """The state before the first forward; `state` is donated."""
        spec = self._spec_of(state)
        return _start_jit(spec, self.method, state, put_rows_on_mesh(spec, check_prompt(spec, prompt)))

    def step(self, params: Any, state: DecodeState) -> tuple[DecodeState, StepLog]:
        """One pass of the loop: at most one forward of every batch row; `state` is donated.

        Returns:
          the new state, and what this pass did: a `StepLog` without the T axis, `kind` NO_FORWARD for rows that waited.
        """
        spec = self._spec_of(state)
        check_places(params, spec.mesh)
        return _best(state, _step_jit, _step_on_gpu)(spec, self.method, params, state)

    def finished(self, state: DecodeState) -> jax.Array:
        """bool `[B]`: rows with nothing left to do."""
        return ~is_live(self._spec_of(state), state)

    def output(self, state: DecodeState) -> DecodeOutput:
        """The output as it stands."""
        return output_of(self._spec_of(state), state)

    def _spec_of(self, state: DecodeState) -> Spec:
        batch, length = state.canvas.tokens.shape
        spec = self.spec(batch, length - self.gen_length, mesh_of(state))
        expected = _abstract_state(spec, self.method)
        if jax.tree.structure(state) != jax.tree.structure(expected) or any(
            np.shape(leaf) != like.shape
            for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
        ):
            raise ValueError(
                f"this state was not made by decode.init of {self.method.name} with gen_length={self.gen_length};"
                " a state belongs to the decode that made it"
            )
        return spec


def lower_decode(decode: Decode, params: Any, prompt_length: int, batch: int = 1, sharding=None) -> jax.stages.Lowered:
    """The decode as `jax.jit` lowers it, from shapes alone; what a state keeps in host memory is made inside, as zeros.

    Args:
      decode: of any method.
      params: parameters, or their `jax.ShapeDtypeStruct`.
      prompt_length, batch: P, B.
      sharding: of every argument, for devices that are not here.
    """
    spec = decode.spec(batch, prompt_length)
    shape = (batch, prompt_length)
    prompt = jax.eval_shape(lambda: Prompt(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)))
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    state = _abstract_state(spec, decode.method)
    arguments = jax.tree.map(place, (decode.method, params, state, prompt))
    avals = _init.trace(spec, decode.method, state.keys).jaxpr.out_avals
    on_host = [aval.memory_space == jax.memory.Space.Host for aval in avals]
    if not any(on_host):
        return _decode.lower(spec, *arguments)

    def whole(method, params, state, prompt):
        # Devices that are not here have no memories by name, so that their arguments are never in host memory.
        leaves = [
            jax.device_put(jnp.zeros_like(x), aval.memory_space) if host else x
            for x, aval, host in zip(jax.tree.leaves(state), avals, on_host, strict=True)
        ]
        return run(spec, method, params, jax.tree.unflatten(jax.tree.structure(state), leaves), prompt)

    return jax.jit(whole, donate_argnums=2).lower(*arguments)


def _abstract_state(spec: Spec, method: Method) -> DecodeState:
    structure = jax.tree.structure(method)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(method))
    return _abstract_state_of(spec, structure, shapes)


@functools.lru_cache(maxsize=64)
def _abstract_state_of(spec: Spec, structure, shapes) -> DecodeState:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), spec.batch))
    return jax.eval_shape(
        lambda method, keys: fresh_state(spec, method, keys), jax.tree.unflatten(structure, shapes), keys
    )


def _best(state: DecodeState, anywhere: Callable, on_gpu: Callable) -> Callable:
    # Options are for outermost programs; who jits a decode within another chooses there.
    outermost = not isinstance(state.keys, Tracer)
    return on_gpu if outermost and all(each.platform == "gpu" for each in state.keys.devices()) else anywhere


GPU_OPTIONS: dict[str, str | bool] = {"xla_gpu_dot_merger_threshold_mb": "2048"}
"""For the compiler: what multiplies the same rows is one product (queries, keys and values; gate and up), which reads
each weight where it lies. By default XLA joins products of up to 32 MB, which those of LLaDA-8B exceed."""

_init = jax.jit(fresh_state, static_argnums=0)
_start_jit = jax.jit(start, static_argnums=0, donate_argnums=2)
_step_jit = jax.jit(step, static_argnums=0, donate_argnums=3)
_step_on_gpu = jax.jit(step, static_argnums=0, donate_argnums=3, compiler_options=GPU_OPTIONS)
_decode = jax.jit(run, static_argnums=0, donate_argnums=3)
_decode_on_gpu = jax.jit(run, static_argnums=0, donate_argnums=3, compiler_options=GPU_OPTIONS)
