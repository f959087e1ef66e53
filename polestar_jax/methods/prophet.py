"""Prophet (arXiv 2508.19982): a fixed schedule that ends as soon as the answer is sure, and fills everything then."""

import jax.numpy as jnp

from polestar_jax.card import Card
from polestar_jax.commit import Quota, Rule, commit_rows, reasons
from polestar_jax.head import Greedy
from polestar_jax.no_cache import NoCache
from polestar_jax.rows import replace_mine, take_rows
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import (
    GENERATION,
    Canvas,
    CommitRule,
    Method,
    Prediction,
    Scope,
    Signal,
    Spec,
    State,
    pytree,
    static,
)

CARD = Card(
    title="Prophet",
    paper="2508.19982",
    reuses="nothing",
    refreshes="everything, in every forward",
    commits="a fixed number per forward; everything at once when the mean gap between the two largest logits of the"
    " answer reaches a bar that falls as decoding goes on",
    state="masks of the block at its entry",
    rows={"full": "N"},
    extra="LM head on all G positions",
    twin="`vanilla`, with bars out of reach; has no cache",
)


def prophet(
    *,
    early: float = 7.5,
    mid: float = 5.0,
    late: float = 2.5,
    answer_start: int | None = None,
    answer_length: int = 5,
    steps: int | None = None,
    block_length: int = 32,
) -> Method:
    """Prophet. The original writes a phrase before the answer into the canvas first: `Prompt.forced` does that.

    Args:
      early, mid, late: mean gap of logits that ends decoding in each third of the schedule.
      answer_start: first generated position of the answer; None, which is ours, looks at all positions still masked.
      answer_length: positions of the answer.
      steps: forwards for the whole generation; None commits one token per forward.
      block_length: S.
    """
    return Method(
        name="prophet",
        cache=NoCache(),
        rule=EarlyExit(Quota(steps=steps), early, mid, late, answer_start, answer_length, steps=steps),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )


@pytree
class EarlyExit(Rule):
    """Commits as another rule does until the answer is sure, and then every mask of the canvas.

    Attributes:
      rule: the other rule; it commits one token per forward, or spreads `steps` evenly.
      early, mid, late, answer_start, answer_length, steps: see `prophet`.
    """

    rule: CommitRule
    early: float = 7.5
    mid: float = 5.0
    late: float = 2.5
    answer_start: float | None = None
    answer_length: float = 5.0
    steps: int | None = static(default=None)

    @property
    def needs(self) -> frozenset[Signal]:
        return self.rule.needs | {"gap", GENERATION}

    def problems(self, spec: Spec) -> list[str]:
        found = self.rule.problems(spec)
        if self.answer_start is not None and not 0 <= self.answer_start < spec.gen_length:
            found = [*found, f"answer_start={self.answer_start} must be between 0 and gen_length={spec.gen_length}"]
        return found if self.answer_length >= 1 else [*found, f"answer_length={self.answer_length} must be at least 1"]

    def init(self, spec: Spec) -> State:
        return self.rule.init(spec)

    def commit(self, spec: Spec, state: State, scope: Scope, canvas: Canvas, prediction: Prediction):
        state, commits = self.rule.commit(spec, state, scope, canvas, prediction)
        masked = prediction.valid & take_rows(canvas.masked, prediction.slot)
        answer = masked
        if self.answer_start is not None:
            place = prediction.slot - spec.prompt_length - self.answer_start
            answer = prediction.valid & (place >= 0) & (place < self.answer_length)
        gap = jnp.where(answer, prediction.extra["gap"], 0.0).sum(axis=1) / jnp.maximum(answer.sum(axis=1), 1)
        steps = spec.gen_length if self.steps is None else self.steps
        done = (scope.index * (steps * spec.span // spec.gen_length) + scope.phase + 1) / steps
        bar = jnp.where(done < 0.33, self.early, jnp.where(done < 0.67, self.mid, self.late))
        sure = answer.any(axis=1) & (gap >= bar)
        return state, replace_mine(sure, commits, commit_rows(prediction, reasons(confidence=masked), spec.length))
