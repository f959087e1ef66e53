"""The cache policy of methods that reuse nothing."""

import jax
import jax.numpy as jnp

from polestar_jax.rows import forward_canvas, predicting_width, whole_pass
from polestar_jax.types import GENERATION, Branch, Canvas, Commits, Prediction, Scope, Signal, Spec, pytree


@pytree
class NoCache:
    """Every forward recomputes the whole canvas."""

    @property
    def provides(self) -> frozenset[Signal]:
        return frozenset({GENERATION})

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset()

    def problems(self, spec: Spec) -> list[str]:
        return []

    def width(self, spec: Spec) -> int:
        return predicting_width(spec)

    def init(self, spec: Spec) -> tuple[()]:
        return ()

    def restart(self, spec: Spec, state: tuple[()]) -> tuple[()]:
        return state

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        def full(params, cache, canvas: Canvas, scope: Scope, mine: jax.Array):
            ran = forward_canvas(spec, params, canvas, scope.visible)
            return whole_pass(spec, cache, canvas, scope, ran.output)

        return (Branch("full", full),)

    def kind(self, spec: Spec, cache: tuple[()], scope: Scope) -> jax.Array:
        return jnp.zeros_like(scope.index)

    def observe(
        self, spec: Spec, cache: tuple[()], scope: Scope, prediction: Prediction, commits: Commits
    ) -> tuple[()]:
        return cache
