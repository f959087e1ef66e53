"""dLLM-Cache (arXiv 2506.06295): features of the prompt kept for long, of the response for short, partly refreshed."""

import jax
import jax.numpy as jnp

from polestar_jax.card import Card
from polestar_jax.commit import quota_or_confidence
from polestar_jax.feature_cache import (
    KINDS,
    Features,
    FirstRow,
    empty_features,
    feature_problems,
    forward_features,
    refresh_kind,
    response_start,
)
from polestar_jax.head import Greedy
from polestar_jax.policy import Policy
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import (
    GENERATION,
    Branch,
    Canvas,
    Commits,
    Method,
    Pass,
    Prediction,
    Scope,
    Signal,
    Spec,
    pytree,
    static,
)

CARD = Card(
    title="dLLM-Cache",
    paper="2506.06295",
    reuses="keys, values, attention outputs and feed-forward outputs of every layer but the first",
    refreshes="the prompt in every `prompt_interval`-th forward, the response in every `response_interval`-th; in"
    " between, in each layer, the `ratio` of the response's rows whose values moved most",
    commits="a fixed number per forward, as LLaDA; or `threshold` or `factor`",
    state="keys, values, attention outputs and feed-forward outputs of every layer",
    rows={
        "step": "(N + (L - 1) int(ratio G)) / L",
        "prompt": "(N + (L - 1) (P + int(ratio G))) / L",
        "response": "(N + (L - 1) G) / L",
        "full": "N",
    },
    extra="values of all G rows of the response, in every layer; where logits are shifted G + 1 rows count as the"
    " response's, P - 1 as the prompt's",
    twin="`vanilla` (or `parallel`): both intervals 1, or ratio 1 and prompt_interval 1",
)


@pytree
class IntervalCache(Policy):
    """Prompt and response are refreshed in their own intervals, and a share of the response in every forward.

    Attributes:
      prompt_interval, response_interval: in forwards; 1 is every forward.
      ratio: share of the response's rows that is computed in between, rounded down; it decides a shape.
      first_row: see `feature_cache.FirstRow`.
    """

    prompt_interval: float
    response_interval: float
    ratio: float = static(default=0.25)
    first_row: FirstRow = static(default="exact")

    @property
    def provides(self) -> frozenset[Signal]:
        return frozenset({GENERATION})

    def problems(self, spec: Spec) -> list[str]:
        found = feature_problems(self.prompt_interval, self.response_interval, self.first_row)
        return found if 0 <= self.ratio <= 1 else [*found, f"ratio={self.ratio} must be between 0 and 1"]

    def init(self, spec: Spec) -> Features:
        return empty_features(spec)

    def restart(self, spec: Spec, state: Features) -> Features:
        return Features(state.layers, jnp.zeros_like(state.forwards))

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        start = response_start(spec, self.first_row)
        rows = int(self.ratio * (spec.length - start))

        def most_moved(layer: int, inputs: jax.Array, change: jax.Array) -> tuple[jax.Array | None, None]:
            return (jax.lax.top_k(change, rows)[1] if rows else None), None

        def bind(kind: str) -> Branch:
            def run(params, cache: Features, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
                ran = forward_features(spec, params, cache, canvas, scope, mine, kind, start, most_moved)
                return ran.done._replace(cache=Features(ran.layers, cache.forwards))

            return Branch(kind, run)

        return tuple(map(bind, KINDS))

    def kind(self, spec: Spec, cache: Features, scope: Scope) -> jax.Array:
        return refresh_kind(cache, self.prompt_interval, self.response_interval)

    def observe(self, spec: Spec, cache: Features, scope: Scope, prediction: Prediction, commits: Commits) -> Features:
        return Features(cache.layers, cache.forwards + 1)


def dllm_cache(
    *,
    prompt_interval: int = 50,
    response_interval: int = 7,
    ratio: float = 0.25,
    steps: int | None = None,
    threshold: float | None = None,
    factor: float | None = None,
    first_row: FirstRow = "exact",
    block_length: int = 32,
) -> Method:
    """dLLM-Cache; the default intervals are those of LLaDA-Instruct on GSM8K.

    The authors' intervals (prompt / response), all with ratio 0.25. LLaDA-8B-Instruct: GSM8K 50 / 7, MATH 50 / 1,
    HumanEval 25 / 5, MBPP 100 / 5, GPQA 50 / 6. Dream-7B-Instruct: GSM8K 25 / 2, MATH 50 / 1, HumanEval 50 / 1,
    MBPP 10 / 8. LLaDA-V's demo: 25 / 7.

    Args:
      prompt_interval, response_interval: K_p and K_r, in forwards.
      ratio: rho, the share of the response refreshed in between.
      steps: forwards of LLaDA's fixed schedule, one per token if None.
      threshold, factor: commit in parallel instead, as in `parallel`.
      first_row: of models with shifted logits only, see `feature_cache.FirstRow`.
      block_length: S.
    """
    return Method(
        name="dllm_cache",
        cache=IntervalCache(prompt_interval, response_interval, ratio, first_row),
        rule=quota_or_confidence(steps, threshold, factor),
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )
