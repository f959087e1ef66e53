"""The cache policy of methods that reuse nothing."""

import jax
import jax.numpy as jnp

from polestar_jax.attention_signals import ATTENTION, attention_problems, with_attention
from polestar_jax.head import slot_confidence
from polestar_jax.policy import Policy
from polestar_jax.rows import forward_canvas, whole_pass
from polestar_jax.types import (
    COMPUTED,
    GENERATION,
    Branch,
    Canvas,
    Pass,
    Scope,
    Signal,
    Spec,
    pytree,
    static,
)


@pytree
class NoCache(Policy):
    """Every forward recomputes the whole canvas.

    Attributes:
      attention_layers: of how many last layers a rule that asks for the attention sees the mean.
    """

    attention_layers: int = static(default=4)

    @property
    def provides(self) -> frozenset[Signal]:
        return ATTENTION | {GENERATION, COMPUTED, "slot_confidence"}

    def problems(self, spec: Spec) -> list[str]:
        return attention_problems(self.attention_layers)

    def init(self, spec: Spec) -> tuple[()]:
        return ()

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        def full(params, cache, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
            ran = forward_canvas(spec, params, canvas, scope.visible)
            done = whole_pass(spec, cache, canvas, scope, ran.output)
            done = with_attention(spec, self.attention_layers, done, ran.queries, ran.keys, None, scope)
            if "slot_confidence" not in spec.needs:
                return done
            confidence = slot_confidence(spec, params, canvas, ran.output)
            return done._replace(planes=(done.planes or {}) | {"slot_confidence": confidence})

        return (Branch("full", full),)

    def kind(self, spec: Spec, cache: tuple[()], scope: Scope) -> jax.Array:
        return jnp.zeros_like(scope.index)
