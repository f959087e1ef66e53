"""Dynamic-dLLM (ICLR 2026): a window around the last commit, and a budget of moved rows shared out among the layers."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from polestar_jax.card import Card
from polestar_jax.commit import quota_or_confidence
from polestar_jax.feature_cache import (
    KINDS,
    Choose,
    Features,
    FirstRow,
    empty_features,
    feature_problems,
    forward_features,
    refresh_kind,
    response_start,
    vectors_change,
)
from polestar_jax.head import Greedy
from polestar_jax.policy import Policy
from polestar_jax.prediction_dynamics import Mode, PredictionDynamics
from polestar_jax.rows import iota, replace_mine
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
    title="Dynamic-dLLM",
    paper="OpenReview SdnkB5pGbq",
    reuses="keys, values, attention outputs and feed-forward outputs of every layer but the first",
    refreshes="in every forward and layer a window around the last commit, and the rows outside it that moved most: as"
    " many as the layer's share b of `budget` (L - 1), by the softmax of the layers' mean changes; prompt and response"
    " in their own intervals",
    commits="a fixed number per forward, as LLaDA; `threshold`, `factor`; or `dynamics`, a threshold that adapts",
    state="keys, values, attention outputs and feed-forward outputs of every layer; a mean change per layer;"
    " `dynamics`: the last probabilities, G V",
    rows={
        "step": "(N + sum over layers 1 to L - 1 of (window + b)) / L",
        "prompt": "as step, and (L - 1) P / L",
        "response": "(N + (L - 1) G) / L",
        "full": "N",
    },
    extra="values of all G rows of the response, in every layer; window is 2 floor(`window` / 2) + 1 rows; where logits"
    " are shifted the response's rows are G + 1, the prompt's P - 1",
    twin="`vanilla` (or `parallel`): both intervals 1; or window G and prompt_interval 1",
)

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    # The factor of the layers' softmax is 1e-8, so that all layers get the same budget.
    "release": {"as_released": True, "budget_scale": 1e-8},
}
"""Fields by preset; a preset changes the defaults."""

Source = Literal["values", "inputs"]


@pytree
class DynamicState:
    """What is kept between forwards.

    Attributes:
      features: see `Features`.
      last: int32 `[B]`, the slot committed last, the rightmost of a forward.
      change: float32 `[B, L]`, mean change of the response's rows in every layer, in the last forward; layer 0's is 0.
      inputs: normalized inputs of layers 1 to L - 1, `[B, G', D]`, where rows are chosen by them; else none.
    """

    features: Features
    last: jax.Array
    change: jax.Array
    inputs: tuple[jax.Array, ...]


def window_rows(centre: jax.Array, width: int, rows: int) -> jax.Array:
    """int32 `[B, width]`: the rows around `centre` `[B]`, all of them within 0 and `rows`."""
    first = jnp.clip(centre - width // 2, 0, rows - width)
    return first[:, None] + iota(width)


def layer_budgets(change: jax.Array, budget, scale) -> jax.Array:
    """int32 `[B, L]`: `budget` rows a layer on average, shared out by the softmax of `scale` `change` `[B, L]`."""
    layers = change.shape[1]
    share = budget * layers * jax.nn.softmax(scale * change, axis=1)
    return jnp.floor(share + 1e-4).astype(jnp.int32)  # equal shares must not be rounded below `budget`


def moved_rows(change: jax.Array, window: jax.Array, count: jax.Array, capacity: int) -> jax.Array:
    """int32 `[B, capacity]`: the `count` `[B]` rows outside `window` `[B, W]` that moved most, then -1."""
    inside = (jnp.arange(change.shape[1])[None, :, None] == window[:, None, :]).any(axis=2)
    moved, row = jax.lax.top_k(jnp.where(inside, -jnp.inf, change), capacity)
    return jnp.where((iota(capacity) < count[:, None]) & jnp.isfinite(moved), row, -1)


@pytree
class WindowBudgetCache(Policy):
    """In every forward a window around the last commit is computed, and the rows outside it that moved most.

    Attributes:
      prompt_interval, response_interval: forwards between refreshes of each part.
      budget: b, rows a layer computes outside the window, on average over the layers.
      budget_scale: factor of the mean changes in the layers' softmax; 0 gives every layer the same.
      window: W; 2 floor(W / 2) + 1 rows are computed around the last commit, all of the response from W = G on.
      capacity: the most rows that a layer may get outside the window.
      select_from: what rows are compared by, "values" or the layers' normalized "inputs".
      as_released: layer 0, which is always complete, takes part in the softmax, with a change of 0; a refresh compares
        after it has overwritten, so that all changes are 0; inputs are kept normalized by steps and plain by refreshes,
        and not at all by the first forward.
      first_row: see `feature_cache.FirstRow`.
    """

    prompt_interval: float
    response_interval: float
    budget: float
    budget_scale: float
    window: int = static(default=32)
    capacity: int = static(default=64)
    select_from: Source = static(default="values")
    as_released: bool = static(default=False)
    first_row: FirstRow = static(default="exact")

    @property
    def provides(self) -> frozenset[Signal]:
        return frozenset({GENERATION})

    def problems(self, spec: Spec) -> list[str]:
        found = feature_problems(self.prompt_interval, self.response_interval, self.first_row)
        if self.select_from not in get_args(Source):
            found.append(f"select_from={self.select_from!r} must be one of {', '.join(get_args(Source))}")
        if self.window < 0 or self.budget < 0:
            found.append(f"window={self.window} and budget={self.budget} must be at least 0")
        if self.capacity < 1:
            found.append(f"capacity={self.capacity} must be at least 1")
        return found

    def init(self, spec: Spec) -> DynamicState:
        start = response_start(spec, self.first_row)
        counted = spec.model.config.layers - (0 if self.as_released else 1)
        shape = (spec.batch, spec.length - start, spec.model.config.model_size)
        planes = spec.model.config.layers - 1 if self.select_from == "inputs" else 0
        return DynamicState(
            features=empty_features(spec),
            last=jnp.full((spec.batch,), start, jnp.int32),
            change=jnp.zeros((spec.batch, counted), jnp.float32),
            inputs=tuple(jnp.zeros(shape, spec.model.config.dtype) for _ in range(planes)),
        )

    def restart(self, spec: Spec, state: DynamicState) -> DynamicState:
        fresh = self.init(spec)
        features = Features(state.features.layers, fresh.features.forwards)
        return dataclasses.replace(fresh, features=features)

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        start = response_start(spec, self.first_row)

        def bind(kind: str) -> Branch:
            def run(params, cache: DynamicState, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
                choose = self._chooser(spec, params, cache, kind, start)
                ran = forward_features(spec, params, cache.features, canvas, scope, mine, kind, start, choose)
                changes, inputs = zip(*ran.notes, strict=True)
                first = [jnp.zeros_like(changes[0])] if self.as_released else []
                now = DynamicState(
                    features=Features(ran.layers, cache.features.forwards),
                    last=cache.last,
                    change=jnp.stack([*first, *changes], axis=1),
                    inputs=inputs if cache.inputs else (),
                )
                now = dataclasses.replace(replace_mine(mine, cache, now), features=now.features)
                return ran.done._replace(cache=now)

            return Branch(kind, run)

        return tuple(map(bind, KINDS))

    def _chooser(self, spec: Spec, params, cache: DynamicState, kind: str, start: int) -> Choose:
        """The `choose` of a forward; it notes the mean change and the inputs of every layer."""
        rows = spec.length - start
        width = rows if self.window >= rows else 2 * (self.window // 2) + 1
        window = window_rows(cache.last - start, width, rows)
        counts = layer_budgets(cache.change, self.budget, self.budget_scale)
        counts = counts[:, -(spec.model.config.layers - 1) :]
        refreshed = kind in ("response", "full")

        def choose(layer: int, inputs: jax.Array, change: jax.Array) -> tuple[jax.Array, Any]:
            if cache.inputs:
                normalized = spec.model.normalize(params, layer, inputs)
                change = vectors_change(normalized, cache.inputs[layer - 1])
                if self.as_released:
                    change = jnp.where((cache.features.forwards == 1)[:, None], 0.0, change)
                inputs = inputs if self.as_released and refreshed else normalized
            mean = change.mean(axis=1) * (0.0 if self.as_released and refreshed else 1.0)
            moved = moved_rows(change, window, counts[:, layer - 1], min(self.capacity, rows))
            return jnp.concatenate([window, moved], axis=1), (mean, inputs)

        return choose

    def kind(self, spec: Spec, cache: DynamicState, scope: Scope) -> jax.Array:
        return refresh_kind(cache.features, self.prompt_interval, self.response_interval)

    def observe(
        self, spec: Spec, cache: DynamicState, scope: Scope, prediction: Prediction, commits: Commits
    ) -> DynamicState:
        last = jnp.max(jnp.where(commits.write, iota(spec.length), -1), axis=1)
        features = Features(cache.features.layers, cache.features.forwards + 1)
        return dataclasses.replace(cache, features=features, last=jnp.where(last < 0, cache.last, last))


def dynamic_dllm(
    preset: str = "paper",
    *,
    prompt_interval: int = 5000,
    response_interval: int = 5000,
    budget: float = 32.0,
    budget_scale: float | None = None,
    window: int = 32,
    capacity: int = 64,
    select_from: Source = "values",
    as_released: bool | None = None,
    steps: int | None = None,
    threshold: float | None = None,
    factor: float | None = None,
    dynamics: Mode | None = None,
    start: float = 1.0,
    alpha: float = 0.01,
    beta: float = 0.15,
    first_row: FirstRow = "exact",
    block_length: int = 32,
) -> Method:
    """Dynamic-dLLM; the defaults are those of the authors' script (LLaDA-8B, GSM8K: block_length 8).

    Args:
      preset: "paper", or "release", in which all layers get the same budget.
      prompt_interval, response_interval: forwards between refreshes; the script never refreshes, the demo has 100 / 7.
      budget, window: rows per layer and forward.
      budget_scale: 10 unless given, the largest that cost no accuracy in our sweep (docs/methods.md): no source says
        what the paper uses. The released code multiplies by 1e-8, which makes it useless, and by 200 in a function that
        nothing calls.
      capacity: the most rows that a layer may get.
      select_from: what rows are compared by, "values" or "inputs".
      as_released: see `WindowBudgetCache`.
      steps: forwards of LLaDA's fixed schedule, one per token if None.
      threshold, factor: commit in parallel instead, as in `parallel`.
      dynamics: commit by a threshold that adapts instead, "scalar" or "position": see `PredictionDynamics`.
      start, alpha, beta: of `dynamics`.
      first_row: of models with shifted logits only, see `feature_cache.FirstRow`.
      block_length: S.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} must be one of {', '.join(PRESETS)}")
    if dynamics is not None and (steps, threshold, factor) != (None, None, None):
        raise ValueError(f"dynamics={dynamics!r} excludes steps, threshold and factor; give one")
    given = {"budget_scale": budget_scale, "as_released": as_released}
    chosen = {"budget_scale": 10.0, "as_released": False} | PRESETS[preset]
    chosen |= {name: value for name, value in given.items() if value is not None}
    adaptive = None if dynamics is None else PredictionDynamics(start, alpha, beta, dynamics)
    return Method(
        name="dynamic_dllm" if preset == "paper" else f"dynamic_dllm:{preset}",
        cache=WindowBudgetCache(
            prompt_interval,
            response_interval,
            budget,
            window=window,
            capacity=capacity,
            select_from=select_from,
            first_row=first_row,
            **chosen,
        ),
        rule=quota_or_confidence(steps, threshold, factor) if adaptive is None else adaptive,
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )
