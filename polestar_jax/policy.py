"""What most cache policies share."""

from polestar_jax.rows import predicting_width
from polestar_jax.types import Commits, Prediction, Scope, Signal, Spec, State


class Policy:
    """No signals served or read, as many predictions as the rule asks for, and no memory of commits.

    `restart` hands the buffers back as they are: for policies that read nothing before an entry has written it.
    """

    @property
    def provides(self) -> frozenset[Signal]:
        return frozenset()

    @property
    def needs(self) -> frozenset[Signal]:
        return frozenset()

    def problems(self, spec: Spec) -> list[str]:
        return []

    def width(self, spec: Spec) -> int:
        return predicting_width(spec)

    def restart(self, spec: Spec, state: State) -> State:
        return state

    def observe(self, spec: Spec, cache: State, scope: Scope, prediction: Prediction, commits: Commits) -> State:
        return cache
