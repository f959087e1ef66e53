"""The pytrees of a decode, and the Protocols of the parts that a method is made of.

Axis letters, used in every annotation: B batch rows, P prompt slots (pads included), G generated slots, N = P + G,
M key slots of the cache (N unless a method keeps shadow rows), S block size, W local window, R rows of a row set,
T forwards a log has room for, K centroids, L layers, H query heads, Hkv key heads, A head size, D model size,
V vocabulary.
A *slot* is an index into the canvas; a *position* counts a row's valid tokens and is what rotary embedding sees.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, dataclass_transform

import jax
from jax.sharding import Mesh

from pallas_kernels.implementation import Implementation

State = Any
"""A pytree whose array leaves all lead with the batch axis B; the loop freezes the batch rows that wait."""

Signal = str
"""What a rule may ask of a forward beside tokens and confidences: a name in `Prediction.extra` ("drift", "suffix",
"margin", "entropy", "gap", "logits", ...), `GENERATION` or `COMPUTED`; or a name in
`Prediction.planes` ("attention_received", "slot_confidence")."""

GENERATION: Signal = "generation"
"""Predictions of every generated position in every forward, not of the block alone."""

COMPUTED: Signal = "computed"
"""Predictions of the generated positions that a forward happens to compute: all of a whole-canvas forward."""


@dataclass_transform(frozen_default=True)
def pytree[T](cls: type[T]) -> type[T]:
    """A frozen dataclass registered as a pytree; fields made by `static()` are part of its structure."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def static(**options: Any) -> Any:
    """A field that decides what is compiled; every other field is a leaf, and changing it does not recompile."""
    return dataclasses.field(metadata={"static": True}, **options)


class Reason(enum.IntEnum):
    """Why a position was committed, as `StepLog.reason` records it."""

    NONE = 0
    CONFIDENCE = 1
    DRIFT = 2
    FORCED = 3
    SUFFIX = 4
    DEPENDENCY = 5


class ModelConfig(Protocol):
    """Static sizes and ids of a model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def model_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def mask_id(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def dtype(self) -> str: ...


class Model(Protocol):
    """What decoding asks of a model: a hashable value with pure functions over `params`.

    `shift` is the distance from a row to the position its logits predict: 0 for LLaDA, 1 for Dream.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def shift(self) -> int: ...
    def abstract_params(self) -> Any: ...
    def embed(self, params: Any, tokens: jax.Array) -> jax.Array: ...
    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array: ...
    def project(self, params: Any, layer: int, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]: ...
    def normalize(self, params: Any, layer: int, hidden: jax.Array) -> jax.Array: ...
    def attention_output(self, params: Any, layer: int, attended: jax.Array) -> jax.Array: ...
    def feed_forward(self, params: Any, layer: int, hidden: jax.Array) -> jax.Array: ...
    def finish(self, params: Any, layer: int, hidden: jax.Array, attended: jax.Array) -> jax.Array: ...
    def logits(self, params: Any, hidden: jax.Array) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything static about one decode; part of the compilation key.

    Attributes:
      model: the model adapter.
      batch: B.
      prompt_length: P, pads included.
      gen_length: G.
      span: how many positions from a block's first one a forward may have to predict (S for fixed blocks).
      needs: the signals the commit rule and the cache policy read.
      mesh: the devices that the decode is spread over, None for one; see `polestar_jax.placement`.
      kernels: implementation of the ops of `pallas_kernels`, see `polestar_jax.kernels`.
    """

    model: Model
    batch: int
    prompt_length: int
    gen_length: int
    span: int
    needs: frozenset[Signal]
    mesh: Mesh | None = None
    kernels: Implementation | None = None

    @property
    def length(self) -> int:
        """N."""
        return self.prompt_length + self.gen_length


@pytree
class Canvas:
    """The token ids being decoded.

    Attributes:
      tokens: int32 `[B, N]`.
      masked: bool `[B, N]`, a plane of its own: a prompt may contain the [MASK] id.
      valid: bool `[B, N]`, false at the pads left of a prompt.
      position: int32 `[B, N]`, rotary positions, counted after the pads.
      embeddings: `[B, P, D]` layer-0 inputs that replace the prompt's (images), or None.
    """

    tokens: jax.Array
    masked: jax.Array
    valid: jax.Array
    position: jax.Array
    embeddings: jax.Array | None = None


@pytree
class Scope:
    """What one forward may see and commit.

    Attributes:
      index: int32 `[B]`, the block.
      start, stop: int32 `[B]`, its slots.
      candidates: bool `[B, N]`, positions that a rule may commit now.
      visible: bool `[B, N]`, keys that may be attended to; the rows of a whole-canvas forward.
      entering: bool `[B]`, true for a block's first forward.
      phase: int32 `[B]`, forwards already spent in the block.
      keys: key `[B]`, this forward's random key of every row.
    """

    index: jax.Array
    start: jax.Array
    stop: jax.Array
    candidates: jax.Array
    visible: jax.Array
    entering: jax.Array
    phase: jax.Array
    keys: jax.Array


@pytree
class RowSet:
    """The rows of one forward.

    Attributes:
      slot: int32 `[B, R]`.
      token: int32 `[B, R]`.
      position: int32 `[B, R]`, rotary.
      valid: bool `[B, R]`; the others are computed and ignored.
      write: bool `[B, R]`, rows whose keys and values go into the cache.
      key_mask: bool `[B, R, M]` where rows differ in what they see, else None.
    """

    slot: jax.Array
    token: jax.Array
    position: jax.Array
    valid: jax.Array
    write: jax.Array
    key_mask: jax.Array | None = None


@pytree
class Prediction:
    """What a forward predicts, already mapped from rows to the positions they predict.

    Attributes:
      slot: int32 `[B, R]`, the predicted slot.
      valid: bool `[B, R]`.
      token: int32 `[B, R]`.
      confidence: float32 `[B, R]`, softmax of the un-noised logits at `token`.
      extra: signal name -> `[B, R, ...]`.
      planes: signal name -> `[B, N, ...]`, signals of slots, predicted or not.
    """

    slot: jax.Array
    valid: jax.Array
    token: jax.Array
    confidence: jax.Array
    extra: dict[Signal, jax.Array]
    planes: dict[Signal, jax.Array] = dataclasses.field(default_factory=dict)


@pytree
class Commits:
    """What a rule decides, over the canvas.

    Attributes:
      write: bool `[B, N]`.
      tokens: int32 `[B, N]`, read where `write`.
      reason: uint8 `[B, N]`, a `Reason` where `write`.
      revoke: bool `[B, N]`, tokens to take back (rules that declare `revokes`): masked again, or written anew where
        `write` too.
      stop: bool `[B]`, rows that end here, whatever is left.
    """

    write: jax.Array
    tokens: jax.Array
    reason: jax.Array
    revoke: jax.Array
    stop: jax.Array


class Pass(NamedTuple):
    """What a branch of a cache policy returns.

    Attributes:
      cache: the policy's state; only the batch rows that are `mine` differ.
      hidden: `[B, R, D]` last-layer outputs of the rows that predict.
      slot, valid: `[B, R]` the rows they belong to.
      extra: signals by row, `[B, R, ...]`.
      computed: int32 `[B, M]`, how many layers ran each slot through their feed-forward part.
      executed: float32 `[]`, rows that the compiled program ran per batch row, mean over layers, padding included.
      planes: signals by slot, `[B, N, ...]`, or None for none.
    """

    cache: State
    hidden: jax.Array
    slot: jax.Array
    valid: jax.Array
    extra: dict[Signal, jax.Array]
    computed: jax.Array
    executed: jax.Array
    planes: dict[Signal, jax.Array] | None = None


class Branch(NamedTuple):
    """One kind of forward: `run(params, cache, canvas, scope, mine) -> Pass`."""

    name: str
    run: Callable[[Any, State, Canvas, Scope, jax.Array], Pass]


class BlockSchedule(Protocol):
    """Which positions are decoded together, and in which order."""

    def problems(self, spec: Spec) -> list[str]: ...
    def span(self, gen_length: int) -> int: ...
    def max_forwards(self, gen_length: int) -> int: ...
    def init(self, spec: Spec) -> State: ...
    def scope(self, spec: Spec, state: State, canvas: Canvas, keys: jax.Array) -> Scope: ...
    def observe(self, spec: Spec, state: State, scope: Scope, prediction: Prediction) -> tuple[State, Scope]: ...
    def advance(self, spec: Spec, state: State, scope: Scope, canvas: Canvas) -> State: ...


class CachePolicy(Protocol):
    """What a forward recomputes and what it reuses. Branches are ordered from cheap to dear."""

    @property
    def provides(self) -> frozenset[Signal]: ...
    @property
    def needs(self) -> frozenset[Signal]:
        """Signals of the logits that `observe` reads."""
        ...

    def problems(self, spec: Spec) -> list[str]: ...
    def width(self, spec: Spec) -> int:
        """The most rows that any branch predicts with."""
        ...

    def init(self, spec: Spec) -> State: ...
    def restart(self, spec: Spec, state: State) -> State:
        """As good as `init`'s, in the buffers of a state that is done with."""
        ...

    def branches(self, spec: Spec) -> tuple[Branch, ...]: ...
    def kind(self, spec: Spec, cache: State, scope: Scope) -> jax.Array: ...
    def observe(self, spec: Spec, cache: State, scope: Scope, prediction: Prediction, commits: Commits) -> State: ...


class CommitRule(Protocol):
    """Which predictions become tokens."""

    @property
    def needs(self) -> frozenset[Signal]: ...
    @property
    def revokes(self) -> bool: ...
    @property
    def progresses(self) -> bool: ...
    def problems(self, spec: Spec) -> list[str]: ...
    def init(self, spec: Spec) -> State: ...
    def commit(
        self, spec: Spec, state: State, scope: Scope, canvas: Canvas, prediction: Prediction
    ) -> tuple[State, Commits]: ...


class Sampler(Protocol):
    """How a token is drawn from logits."""

    def problems(self, spec: Spec) -> list[str]: ...
    def adjust(self, spec: Spec, logits: jax.Array) -> jax.Array:
        """The logits float32 `[B, R, V]` that tokens, confidences and signals come from."""
        ...

    def sample(
        self, spec: Spec, logits: jax.Array, slot: jax.Array, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array]: ...


@pytree
class StepLog:
    """What every forward of every batch row did, in the row's own order; replaying it over the first canvas gives the
    last one.

    Attributes:
      kind: uint8 `[B, T]`, index into the policy's branches, `NO_FORWARD` where there was none.
      rows: float32 `[B, T]`, valid rows through the feed-forward part, mean over layers.
      rows_executed: float32 `[B, T]`, the same as the compiled program ran it, capacity included.
      token: int32 `[B, T, G]`, the token committed there by that forward, `NOTHING`, or `REVOKED`; a token that takes
        another's place is just committed.
      reason: uint8 `[B, T, G]`, a `Reason`.
      drift: float32 `[B, T, G]`, NaN where not measured; `[B, T, 0]` if the policy measures none.
      computed: uint8 `[B, T, N]`, layers that recomputed the slot.
    """

    kind: jax.Array
    rows: jax.Array
    rows_executed: jax.Array
    token: jax.Array
    reason: jax.Array
    drift: jax.Array
    computed: jax.Array


NO_FORWARD = 255
NOTHING = -1
REVOKED = -2


@pytree
class DecodeState:
    """Everything a decode owns, as one pytree.

    Attributes:
      keys: key `[B]`, as given; never advanced.
      forwards: int32 `[B]`, forwards each batch row has spent; a wait is none.
      stopped: bool `[B]`, rows that ended early.
      canvas, schedule, cache, rule, log: see their classes.
    """

    keys: jax.Array
    forwards: jax.Array
    stopped: jax.Array
    canvas: Canvas
    schedule: State
    cache: State
    rule: State
    log: StepLog


@pytree
class DecodeOutput:
    """A finished decode.

    Attributes:
      tokens: int32 `[B, G]`; the [MASK] id where not `filled`.
      filled: bool `[B, G]`.
      forwards: int32 `[B]`.
      log: see `StepLog`; `polestar_jax.metrics` reads it.
    """

    tokens: jax.Array
    filled: jax.Array
    forwards: jax.Array
    log: StepLog


@pytree
class Prompt:
    """Left-padded prompts.

    Attributes:
      tokens: int32 `[B, P]`.
      valid: bool `[B, P]`, false at pads.
      embeddings: `[B, P, D]` or None.
      forced: int32 `[B, G]`, tokens that the generation is to hold, `NOTHING` where it is free; None for none.
    """

    tokens: jax.Array
    valid: jax.Array
    embeddings: jax.Array | None = None
    forced: jax.Array | None = None


@pytree
class Method:
    """A decoding method: a cache policy, a commit rule, a block schedule and a sampler.

    Attributes:
      name: shown in tables and errors.
      cache, rule, schedule, sampler: see the Protocols.
      guidance: scale of classifier-free guidance, or None for none.
    """

    cache: CachePolicy
    rule: CommitRule
    schedule: BlockSchedule
    sampler: Sampler
    name: str = static()
    guidance: float | None = None
