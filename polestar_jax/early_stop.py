"""Ends a row at its end-of-text token; off in every method's defaults, since the paper counts full trajectories."""

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.commit import WrappedRule
from polestar_jax.rows import iota
from polestar_jax.types import Canvas, CommitRule, Prediction, Reason, Scope, Spec, State, pytree


@pytree
class StopAtEos(WrappedRule):
    """Commits as another rule does; a block that is finished and holds EOS fills everything after it with EOS.

    Attributes:
      rule: the other rule.
    """

    rule: CommitRule

    def commit(self, spec: Spec, state: State, scope: Scope, canvas: Canvas, prediction: Prediction):
        state, commits = self.rule.commit(spec, state, scope, canvas, prediction)
        slot, eos_id = iota(spec.length), spec.model.config.eos_id
        inside = (slot >= scope.start[:, None]) & (slot < scope.stop[:, None])
        masked = (canvas.masked | commits.revoke) & ~commits.write
        tokens = jnp.where(commits.write, commits.tokens, canvas.tokens)
        ends = ~(inside & masked).any(axis=1) & (inside & ~masked & (tokens == eos_id)).any(axis=1)
        rest = ends[:, None] & canvas.masked & (slot >= scope.stop[:, None]) & ~commits.write
        return state, dataclasses.replace(
            commits,
            write=commits.write | rest,
            tokens=jnp.where(rest, eos_id, commits.tokens),
            reason=jnp.where(rest, jnp.uint8(Reason.FORCED), commits.reason),
        )


@pytree
class EndAtEos(WrappedRule):
    """Commits as another rule does, but nothing right of a committed EOS: that stays masked, and the row ends.

    Attributes:
      rule: the other rule.
    """

    rule: CommitRule

    def commit(self, spec: Spec, state: State, scope: Scope, canvas: Canvas, prediction: Prediction):
        reached = before_eos(spec, canvas.tokens, canvas.masked)
        scope = dataclasses.replace(scope, candidates=scope.candidates & reached)
        state, commits = self.rule.commit(spec, state, scope, canvas, prediction)
        masked = (canvas.masked | commits.revoke) & ~commits.write
        tokens = jnp.where(commits.write, commits.tokens, canvas.tokens)
        left = masked & before_eos(spec, tokens, masked)
        return state, dataclasses.replace(commits, stop=commits.stop | ~left.any(axis=1))


def before_eos(spec: Spec, tokens: jax.Array, masked: jax.Array) -> jax.Array:
    """bool `[B, N]`: slots left of the first generated EOS, all of them where there is none."""
    generated = iota(spec.length) >= spec.prompt_length
    return jnp.cumsum((tokens == spec.model.config.eos_id) & generated & ~masked, axis=1) == 0
