"""Commit rules: which predictions become tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from polestar_jax.drift import History, delta, extend
from polestar_jax.rows import iota, put_rows, replace_mine, take_rows
from polestar_jax.schedule import masks_at_entry, step_problems, steps_per_block
from polestar_jax.types import (
    Canvas,
    CommitRule,
    Commits,
    Prediction,
    Reason,
    Scope,
    Signal,
    Spec,
    State,
    pytree,
    static,
)


def candidate_rows(scope: Scope, prediction: Prediction) -> jax.Array:
    """bool `[B, R]`: predictions of positions that may be committed now."""
    return prediction.valid & take_rows(scope.candidates, prediction.slot)


def most_confident(confidence: jax.Array, eligible: jax.Array) -> jax.Array:
    """bool `[B, R]`: the most confident eligible row, the first of equals; none where nothing is eligible."""
    best = jnp.argmax(jnp.where(eligible, confidence, -jnp.inf), axis=1)
    return eligible & (iota(confidence.shape[1]) == best[:, None])


def rank(score: jax.Array, eligible: jax.Array) -> jax.Array:
    """int32 `[B, R]`: place of each row by descending score, 0 first, earlier rows first among equals."""
    order = jnp.argsort(jnp.where(eligible, -score, jnp.inf), axis=1, stable=True)
    return jnp.argsort(order, axis=1, stable=True).astype(jnp.int32)


def score_of(prediction: Prediction, name: Signal) -> jax.Array:
    """float32 `[B, R]`: "confidence", or a signal by which rows are put in order; "entropy" is negated."""
    if name == "confidence":
        return prediction.confidence
    return -prediction.extra["entropy"] if name == "entropy" else prediction.extra[name]


def drawn(spec: Spec, scope: Scope, prediction: Prediction, draw: Callable[..., jax.Array]) -> jax.Array:
    """float32 `[B, R]`: a number for each predicted position, `draw`n (as in `jax.random`) with this forward's keys."""
    plane = jax.vmap(lambda key: draw(key, (spec.gen_length,)))(scope.keys)
    return take_rows(plane, prediction.slot - spec.prompt_length)


def commit_rows(prediction: Prediction, reason: jax.Array, length: int) -> Commits:
    """`Commits` over a canvas of `length` slots from a uint8 `reason` `[B, R]`, `Reason.NONE` where nothing happens."""
    write = reason != Reason.NONE
    batch = prediction.slot.shape[0]
    place = lambda values, dtype: put_rows(jnp.zeros((batch, length), dtype), prediction.slot, values, write)
    return Commits(
        write=place(write, bool),
        tokens=place(prediction.token, jnp.int32),
        reason=place(reason, jnp.uint8),
        revoke=jnp.zeros((batch, length), bool),
        stop=jnp.zeros((batch,), bool),
    )


def reasons(**chosen: jax.Array) -> jax.Array:
    """uint8 `[B, R]`: the first reason, in the order of `Reason`, whose plane is true."""
    planes = [(reason, chosen[reason.name.lower()]) for reason in Reason if reason.name.lower() in chosen]
    code = jnp.zeros(planes[0][1].shape, jnp.uint8)
    for reason, plane in reversed(planes):
        code = jnp.where(plane, jnp.uint8(reason), code)
    return code


class Rule:
    """What most rules share: no signals, no memory, at least one commit per forward, none taken back."""

    revokes = False
    progresses = True

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset()

    def init(self, spec: Spec) -> State:
        return ()


class WrappedRule:
    """What rules that change another rule's commits share: signals, memory and promises are those of `rule`."""

    rule: CommitRule

    @property
    def needs(self) -> frozenset[Signal]:
        return self.rule.needs

    @property
    def revokes(self) -> bool:
        return self.rule.revokes

    @property
    def progresses(self) -> bool:
        return self.rule.progresses

    def problems(self, spec: Spec) -> list[str]:
        return self.rule.problems(spec)

    def init(self, spec: Spec) -> State:
        return self.rule.init(spec)


@pytree
class Threshold(Rule):
    """Every candidate with confidence >= tau, and always the most confident one (Fast-dLLM's parallel decoding).

    Attributes:
      tau: tau_s of the paper.
    """

    tau: float

    def problems(self, spec: Spec) -> list[str]:
        return []

    def commit(self, spec: Spec, state, scope: Scope, canvas: Canvas, prediction: Prediction):
        eligible = candidate_rows(scope, prediction)
        confident = eligible & (prediction.confidence >= self.tau)
        code = reasons(confidence=confident, forced=most_confident(prediction.confidence, eligible))
        return state, commit_rows(prediction, code, spec.length)


@pytree
class Factor(Rule):
    """Fast-dLLM's factor rule: the r-th most confident candidate is taken while confidence >= 1 - factor / (r + 1).

    Attributes:
      factor: larger commits more.
      release: the released code's habit, which takes all candidates when only the last one fails.
    """

    factor: float
    release: bool = static(default=False)

    def problems(self, spec: Spec) -> list[str]:
        return [] if self.factor > 0 else [f"factor={self.factor} must be greater than 0"]

    def commit(self, spec: Spec, state, scope: Scope, canvas: Canvas, prediction: Prediction):
        eligible = candidate_rows(scope, prediction)
        count = eligible.sum(axis=1, keepdims=True)
        place = rank(prediction.confidence, eligible)
        bar = jnp.where(place == 0, -1.0, 1 - self.factor / (place + 2))
        failing = eligible & (prediction.confidence < bar)
        first = jnp.min(jnp.where(failing, place, count), axis=1, keepdims=True)
        if self.release:
            first = jnp.where(first == count - 1, count, first)
        chosen = eligible & (place < first)
        passing = prediction.confidence >= 1 - self.factor / (place + 2)
        code = reasons(confidence=chosen & passing, forced=chosen)
        return state, commit_rows(prediction, code, spec.length)


@pytree
class EntropyBound(Rule):
    """The most confident candidates whose entropies, the largest left out, sum to at most gamma; always the first.

    That sum bounds the dependence which committing them together ignores (arXiv 2505.24857, algorithm 1).

    Attributes:
      gamma: in nats.
      release: leave out the last candidate's own entropy, not the largest (d2Cache's port, where a maximum over the
        batch stands for one over the candidates).
    """

    gamma: float
    release: bool = static(default=False)

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset({"entropy"})

    def problems(self, spec: Spec) -> list[str]:
        return []

    def commit(self, spec: Spec, state, scope: Scope, canvas: Canvas, prediction: Prediction):
        eligible = candidate_rows(scope, prediction)
        place = rank(prediction.confidence, eligible)
        entropy = jnp.where(eligible, prediction.extra["entropy"], 0.0)
        sorted_entropy = jnp.take_along_axis(entropy, jnp.argsort(place, axis=1), axis=1)
        left_out = sorted_entropy if self.release else jax.lax.cummax(sorted_entropy, axis=1)
        bounded = jnp.cumsum(sorted_entropy, axis=1) - left_out <= self.gamma
        chosen = eligible & jnp.take_along_axis(bounded, place, axis=1)
        first = most_confident(prediction.confidence, eligible)
        return state, commit_rows(prediction, reasons(confidence=chosen, forced=first), spec.length)


def confidence_rule(threshold: float | None, factor: float | None) -> Threshold | Factor:
    """The rule that one of the two numbers asks for; a threshold of 0.9 if neither is given."""
    if threshold is not None and factor is not None:
        raise ValueError(f"threshold={threshold} and factor={factor} exclude each other; give one")
    return Threshold(0.9 if threshold is None else threshold) if factor is None else Factor(factor)


def quota_of(masks: jax.Array, forwards: int, phase: jax.Array) -> jax.Array:
    """int32 `[B]`: how many of `masks` `[B]` go in forward number `phase` `[B]` of `forwards`, the first ones more."""
    return masks // forwards + (phase < masks % forwards)


@pytree
class FirstTokenAtEntry(WrappedRule):
    """A block's entry commits the block's first position, whatever its confidence, and nothing else.

    Fast-dLLM's habit on models with shifted logits: see `block_cache.FirstToken`.

    Attributes:
      rule: decides in all other forwards, and at an entry whose first position has its token already.
    """

    rule: CommitRule

    def commit(self, spec: Spec, state: State, scope: Scope, canvas: Canvas, prediction: Prediction):
        state, commits = self.rule.commit(spec, state, scope, canvas, prediction)
        first = candidate_rows(scope, prediction) & (prediction.slot == scope.start[:, None])
        alone = scope.entering & first.any(axis=1)
        return state, replace_mine(alone, commits, commit_rows(prediction, reasons(forced=first), spec.length))


@pytree
class Quota(Rule):
    """LLaDA's fixed schedule: the masks of a block at its entry, spread evenly over the block's forwards.

    Attributes:
      steps: forwards for the whole generation, a multiple of the number of blocks; None is one per token.
      remasking: "low_confidence" commits the most confident, "random" any.
    """

    steps: int | None = static(default=None)
    remasking: str = static(default="low_confidence")

    def problems(self, spec: Spec) -> list[str]:
        found = step_problems(spec, self.steps)
        if self.remasking not in ("low_confidence", "random"):
            found.append(f"remasking={self.remasking!r} must be 'low_confidence' or 'random'")
        return found

    def init(self, spec: Spec) -> jax.Array:
        """int32 `[B]`: masks of the block at its entry."""
        return jnp.zeros((spec.batch,), jnp.int32)

    def commit(self, spec: Spec, state: jax.Array, scope: Scope, canvas: Canvas, prediction: Prediction):
        at_entry = masks_at_entry(scope, state)
        quota = quota_of(at_entry, steps_per_block(spec, self.steps), scope.phase)
        eligible = candidate_rows(scope, prediction)
        score = prediction.confidence
        if self.remasking == "random":
            score = drawn(spec, scope, prediction, jax.random.uniform)
        chosen = eligible & (rank(score, eligible) < quota[:, None])
        return at_entry, commit_rows(prediction, reasons(forced=chosen), spec.length)


def quota_or_confidence(steps: int | None, threshold: float | None, factor: float | None) -> CommitRule:
    """LLaDA's fixed schedule, which most caches were published with, unless `threshold` or `factor` is given."""
    if threshold is None and factor is None:
        return Quota(steps=steps)
    if steps is not None:
        raise ValueError(f"steps={steps} excludes threshold and factor; give one")
    return confidence_rule(threshold, factor)


@pytree
class PolestarCommit(Rule):
    """Polestar-Commit (section 4.2): a confidence threshold, a drift gate below it, and commits from the suffix window.

    A candidate is committed when confidence >= tau, or when its drift delta >= alpha (tau - confidence)^2, and the most
    confident one always is. The gate is not applied at block entries: there is no earlier attention to compare with.

    Attributes:
      tau: tau_s.
      alpha: scale of the drift threshold.
      gate_level: added to the drift threshold; with alpha = 0 it is the fixed threshold of figure 6b.
      history: h, how many earlier drifts of the block a delta is measured against; 0 compares with nothing.
      gate_floor, gate_ceiling: the gate also asks for confidence > floor and delta < ceiling (the release's 0.7 and 2).
      suffix_tau: confidence that a suffix position needs.
      drift_gate, suffix_commit: switch the two parts.
      history_length: room for past drifts, >= `history`.
    """

    tau: float = 0.9
    alpha: float = 10.0
    gate_level: float = 0.0
    history: float = 5.0
    gate_floor: float = -1.0
    gate_ceiling: float = float("inf")
    suffix_tau: float = 0.9
    drift_gate: bool = static(default=True)
    suffix_commit: bool = static(default=True)
    history_length: int = static(default=8)

    @property
    def needs(self) -> frozenset[Signal]:
        gate = {"drift"} if self.drift_gate else set()
        return frozenset(gate | ({"suffix"} if self.suffix_commit else set()))

    def problems(self, spec: Spec) -> list[str]:
        if 0 <= self.history <= self.history_length:
            return []
        return [f"history={self.history} must be between 0 and history_length={self.history_length}"]

    def init(self, spec: Spec) -> History | None:
        return History.empty(spec.batch, spec.span, self.history_length) if self.drift_gate else None

    def commit(self, spec: Spec, state: History | None, scope: Scope, canvas: Canvas, prediction: Prediction):
        confidence = prediction.confidence
        eligible = candidate_rows(scope, prediction)
        planes = {
            "confidence": eligible & (confidence >= self.tau),
            "forced": most_confident(confidence, eligible),
        }
        if state is not None:
            inside = (
                prediction.valid & (prediction.slot >= scope.start[:, None]) & (prediction.slot < scope.stop[:, None])
            )
            offset = prediction.slot - scope.start[:, None]
            state = state.cleared(scope.entering)
            sharp = delta(state, offset, prediction.extra["drift"], self.history)
            bar = self.gate_level + self.alpha * (self.tau - confidence) ** 2
            gate = (sharp >= bar) & (sharp < self.gate_ceiling)
            gate = gate & (confidence > self.gate_floor) & ~scope.entering[:, None]
            planes["drift"] = eligible & gate
            state = extend(state, offset, prediction.extra["drift"], inside, ~scope.entering)
        if self.suffix_commit:
            suffix = prediction.valid & prediction.extra["suffix"] & take_rows(canvas.masked, prediction.slot)
            planes["suffix"] = suffix & (confidence >= self.suffix_tau)
        return state, commit_rows(prediction, reasons(**planes), spec.length)
