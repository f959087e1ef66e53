"""Polestar-Cache (paper section 4.1): block-wise KV reuse with sparse refreshes of what drifted in the local window."""

import dataclasses
import functools
from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp

from pallas_kernels.drift_reference import DriftReference
from polestar_jax.attention import empty_cache
from polestar_jax.attention_signals import ATTENTION, attention_problems
from polestar_jax.cluster import OUTSIDE, Draws
from polestar_jax.drift import Floor, as_reference
from polestar_jax.kernels import implementation
from polestar_jax.offload import Offload, store
from polestar_jax.polestar_entry import full_entry, window_entry
from polestar_jax.polestar_step import refresh, step
from polestar_jax.policy import Policy
from polestar_jax.quantize import FORMATS, Codes, Format, quantize
from polestar_jax.rows import predicting_width
from polestar_jax.types import (
    COMPUTED,
    Branch,
    Commits,
    Prediction,
    Reason,
    Scope,
    Signal,
    Spec,
    pytree,
    static,
)
from polestar_jax.window import Windows, encode

STEP, REFRESH, WINDOW_ENTRY, FULL_ENTRY = range(4)


@pytree
class PolestarState:
    """Everything Polestar-Cache remembers.

    Attributes:
      keys, values: per layer `[B, Hkv, N, A]`, keys rotated.
      windows: of every layer.
      slot: int32 `[B, W]`, the window's slots.
      region: int32 `[B, W]`.
      token: int32 `[B, W]`, the tokens that layer 0's rows were made from.
      attention: of the block's rows in the last layer at the last forward; None if no rule asks for drift.
      running, last: int32 `[B]`, block commits since and including the last refresh or entry; of the last forward.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    windows: Windows
    slot: jax.Array
    region: jax.Array
    token: jax.Array
    attention: DriftReference | None
    running: jax.Array
    last: jax.Array


@pytree
class PolestarCache(Policy):
    """When and where stale rows are recomputed.

    Attributes:
      selected: k, clusters refreshed per layer.
      selected_last: the same for the last layer, whose packet only serves suffix commits.
      update_threshold: tau_upd; a refresh follows when more tokens were committed since the last one.
      step_threshold: a refresh follows a single forward that committed more than this: the release's own trigger; in
        the paper's reading the running count covers it.
      window_entry_period: every so many blocks the last one is entered with window and block rows only; 2 is the
        paper's "every alternate block", 0 enters every block with a full-sequence forward.
      clusters: K.
      iterations: of k-means.
      prefix_blocks, suffix_blocks: the local window, in blocks; the paper's (2, 1).
      format: of the window's hidden states (table 11).
      residual: code residuals to the centroids, not the rows.
      tensor_scale: a second float32 scale of NVFP4, as NVIDIA's format has.
      offload: "host" keeps the codes in pinned host memory between the forwards that read them; everything else of the
        window stays on the device (docs/offload.md).
      capacities: fractions of the window that a refresh's row set is compiled for; the smallest that holds is run.
        With 1 alone the whole window runs, and no rows are gathered.
      attention_layers: as in `NoCache`; means are over the block's rows, and over all rows at full entries.
      mean_heads: KL of the head-averaged attention instead of the mean of the heads' KL.
      count_eos, refresh_tokens, memberless, random_start, suffixless_keeps_all, epsilon, token_floor, proxy_floor:
        differences between the presets; see `polestar_jax.methods.polestar`.
      draws: recorded k-means draws, leaves `[B, blocks, L, ...]`, that replace the random ones; None draws.
    """

    selected: float = 4.0
    selected_last: float = 4.0
    update_threshold: float = 3.0
    step_threshold: float = float("inf")
    window_entry_period: float = 2.0
    clusters: int = static(default=8)
    iterations: int = static(default=5)
    prefix_blocks: int = static(default=2)
    suffix_blocks: int = static(default=1)
    format: Format = static(default="nvfp4")
    residual: bool = static(default=True)
    tensor_scale: bool = static(default=False)
    offload: Offload = static(default="none")
    capacities: tuple[float, ...] = static(default=(0.5, 0.67, 1.0))
    attention_layers: int = static(default=4)
    mean_heads: bool = static(default=False)
    count_eos: bool = static(default=False)
    refresh_tokens: bool = static(default=True)
    memberless: bool = static(default=False)
    random_start: bool = static(default=False)
    suffixless_keeps_all: bool = static(default=True)
    epsilon: float = static(default=0.0)
    token_floor: Floor = static(default="none")
    proxy_floor: Floor = static(default="none")
    draws: Draws | None = None

    @property
    def provides(self) -> frozenset[Signal]:
        return ATTENTION | {"drift", "suffix", COMPUTED}

    def problems(self, spec: Spec) -> list[str]:
        found = attention_problems(self.attention_layers)
        if self.clusters < 2:
            found.append(f"clusters={self.clusters} must be at least 2, one for each side of the block")
        if self.iterations < 1:
            found.append(f"iterations={self.iterations} must be at least 1")
        if self.prefix_blocks < 0 or self.suffix_blocks < 0 or self.prefix_blocks + self.suffix_blocks < 1:
            found.append(
                f"the window of prefix_blocks={self.prefix_blocks} and suffix_blocks={self.suffix_blocks} is empty"
            )
        if not self.capacities or sorted(self.capacities) != list(self.capacities) or self.capacities[-1] != 1:
            found.append(f"capacities={self.capacities} must rise and end in 1.0")
        if self.offload not in get_args(Offload):
            found.append(f"offload={self.offload!r} must be one of {', '.join(get_args(Offload))}")
        if self.format not in FORMATS:
            found.append(f"format={self.format!r} must be one of {', '.join(FORMATS)}")
        else:
            try:
                size = spec.model.config.model_size
                jax.eval_shape(lambda: quantize(jnp.zeros((1, size)), self.format, tensor_scale=self.tensor_scale))
            except ValueError as error:
                found.append(str(error))
        return found

    def window(self, spec: Spec) -> tuple[int, int]:
        """Slots before and after the block; more than a canvas of them would only be padding."""
        whole = spec.length
        return min(self.prefix_blocks * spec.span, whole), min(self.suffix_blocks * spec.span, spec.gen_length)

    def width(self, spec: Spec) -> int:
        block = spec.span + spec.model.shift + (self.window(spec)[1] if "suffix" in spec.needs else 0)
        return max(block, predicting_width(spec))

    def init(self, spec: Spec) -> PolestarState:
        config = spec.model.config
        if self.offload != "none" and spec.mesh is not None:
            raise ValueError(f"offload={self.offload!r} is for one device, and this decode has a mesh: use 'none'")
        window = sum(self.window(spec))
        heads = 1 if self.mean_heads else config.heads
        rows = jnp.zeros((spec.batch, window, config.model_size), config.dtype)
        labels = jnp.full((spec.batch, window), OUTSIDE, jnp.int32)
        centroids = jnp.zeros((spec.batch, self.clusters, config.model_size), jnp.float32)
        codes = encode(rows, centroids if self.anchored else None, labels, self.format, self.tensor_scale)
        stack = lambda leaf: jnp.stack([leaf] * config.layers, axis=1)
        nothing = lambda rows: as_reference(jnp.zeros((spec.batch, heads, rows, spec.length), jnp.float32))
        reference = nothing(self.clusters)
        windows = Windows(
            codes=(store(self.offload, codes),) * config.layers,
            scores=(reference.scores,) * config.layers,
            anchors=stack(centroids) if self.anchored else None,
            centroids=stack(centroids),
            labels=stack(labels),
            counts=stack(jnp.zeros((spec.batch, self.clusters), jnp.int32)),
            log_sum=stack(reference.log_sum),
        )
        zeros = jnp.zeros((spec.batch,), jnp.int32)
        return PolestarState(
            keys=empty_cache(spec),
            values=empty_cache(spec),
            windows=windows,
            slot=jnp.zeros_like(labels),
            region=labels,
            token=jnp.zeros_like(labels),
            attention=nothing(spec.span + spec.model.shift) if "drift" in spec.needs else None,
            running=zeros,
            last=zeros,
        )

    def restart(self, spec: Spec, state: PolestarState) -> PolestarState:
        # The first block's full entry overwrites every key, value and code.
        fresh = self.init(spec)
        windows = dataclasses.replace(fresh.windows, codes=state.windows.codes)
        return dataclasses.replace(fresh, keys=state.keys, values=state.values, windows=windows)

    @property
    def anchored(self) -> bool:
        """Whether the codes are residuals."""
        # Rows that are not coded need no anchor, and adding one would round them.
        return self.residual and self.format != "none"

    def coder(self, spec: Spec) -> Callable[..., Codes]:
        """`window.encode(rows, anchors, labels, kept=None)` of this format."""
        return functools.partial(
            encode, format=self.format, tensor_scale=self.tensor_scale, kernels=implementation(spec)
        )

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        bind = lambda run: lambda *arguments: run(self, spec, *arguments)
        return (
            Branch("step", bind(step)),
            Branch("refresh", bind(refresh)),
            Branch("window entry", bind(window_entry)),
            Branch("full entry", bind(full_entry)),
        )

    def kind(self, spec: Spec, cache: PolestarState, scope: Scope) -> jax.Array:
        period = self.window_entry_period
        window = (period > 0) & (scope.index % jnp.maximum(period, 1) == period - 1) & (scope.index > 0)
        stale = (cache.running > self.update_threshold) | (cache.last > self.step_threshold)
        inside = jnp.where(stale, REFRESH, STEP)
        return jnp.where(scope.entering, jnp.where(window, WINDOW_ENTRY, FULL_ENTRY), inside)

    def observe(
        self, spec: Spec, cache: PolestarState, scope: Scope, prediction: Prediction, commits: Commits
    ) -> PolestarState:
        counted = commits.write & (commits.reason != Reason.SUFFIX)
        if not self.count_eos:
            counted = counted & (commits.tokens != spec.model.config.eos_id)
        last = counted.sum(axis=1, dtype=jnp.int32)
        return dataclasses.replace(cache, last=last, running=cache.running + last)
