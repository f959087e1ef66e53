"""Sparse-dLLM (arXiv 2508.02558): keys and values outside the block are kept where the block's queries point to."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from polestar_jax.attention import attend, project_rows
from polestar_jax.block_cache import first_token_problems, step_slots
from polestar_jax.card import Card
from polestar_jax.commit import FirstTokenAtEntry, quota_or_confidence
from polestar_jax.head import Greedy
from polestar_jax.policy import Policy
from polestar_jax.rows import (
    count_rows,
    embed_rows,
    forward_canvas,
    iota,
    replace_mine,
    rows_at,
    rows_pass,
    slots_of,
    take_rows,
    whole_pass,
)
from polestar_jax.schedule import SemiAutoregressive
from polestar_jax.types import (
    Branch,
    Canvas,
    Method,
    Pass,
    RowSet,
    Scope,
    Spec,
    pytree,
    static,
)

CARD = Card(
    title="Sparse-dLLM",
    paper="2508.02558",
    reuses="the `keep_ratio` of the keys and values outside the block that its queries point to most, in each layer",
    refreshes="everything, in a block's first two forwards; the second one chooses what to keep",
    commits="a fixed number per forward, as LLaDA; or `threshold` or `factor`",
    state="keys and values of int(keep_ratio (N - S)) positions per layer",
    rows={"step": "S, one more where logits are shifted and `first_token` is exact", "whole": "N"},
    extra="a whole forward multiplies a mean query with all keys, in each layer",
    twin="keep_ratio 1: Fast-dLLM's dual cache, entered in the first two forwards of every block",
)


FirstToken = Literal["exact", "entry"]
"""As in `block_cache`, without "instead": a row of the block that no step runs would be one to keep or drop."""


@pytree
class KeptLayer:
    """What a layer keeps of the positions outside the block, the most important first.

    Attributes:
      keys, values: `[B, Hkv, C, A]`, keys rotated.
      slot: int32 `[B, C]`, where they are from; N where fewer are kept.
    """

    keys: jax.Array
    values: jax.Array
    slot: jax.Array


def importance_of(query: jax.Array, valid: jax.Array, keys: jax.Array) -> jax.Array:
    """float32 `[B, N]`: `keys` `[B, Hkv, N, A]` times the mean `valid` row of `query` `[B, R, H, A]`, mean over H."""
    batch, _, heads, size = query.shape
    total = jnp.where(valid[:, :, None, None], query.astype(jnp.float32), 0).sum(axis=1)
    mean = (total / valid.sum(axis=1)[:, None, None]).reshape(batch, keys.shape[1], -1, size)
    scores = jnp.einsum("bkga,bkna->bkgn", mean, keys, preferred_element_type=jnp.float32)
    return scores.sum(axis=(1, 2)) / heads


def pooled(importance: jax.Array, kernel: int) -> jax.Array:
    """The maximum over `kernel` neighbours of every place of `[B, M]`."""
    return jax.lax.reduce_window(importance, -jnp.inf, jax.lax.max, (1, kernel), (1, 1), "SAME")


@pytree
class PrunedCache(Policy):
    """A block's first two forwards are complete; its others compute the block against the keys that the second kept.

    Attributes:
      keep_ratio: share of the positions outside the block that is kept; it decides a shape.
      kernel: neighbours that the importance is pooled over, an odd number; 1 is none.
      first_token: see `block_cache.step_slots`.
    """

    keep_ratio: float = static(default=0.5)
    kernel: int = static(default=3)
    first_token: FirstToken = static(default="exact")

    def problems(self, spec: Spec) -> list[str]:
        found = first_token_problems(spec, self.first_token, get_args(FirstToken))
        if not 0 <= self.keep_ratio <= 1:
            found.append(f"keep_ratio={self.keep_ratio} must be between 0 and 1")
        if self.kernel < 1 or self.kernel % 2 == 0:
            found.append(f"kernel={self.kernel} must be odd")
        return found

    def width(self, spec: Spec) -> int:
        return spec.span + spec.model.shift

    def init(self, spec: Spec) -> tuple[KeptLayer, ...]:
        config, kept = spec.model.config, int(self.keep_ratio * spec.length)
        shape = (spec.batch, config.kv_heads, kept, config.model_size // config.heads)
        empty = lambda: jnp.zeros(shape, config.dtype)
        return tuple(
            KeptLayer(empty(), empty(), jnp.full((spec.batch, kept), spec.length, jnp.int32))
            for _ in range(config.layers)
        )

    def restart(self, spec: Spec, state: tuple[KeptLayer, ...]) -> tuple[KeptLayer, ...]:
        return state  # nothing is read before a block's second forward has written it

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        bind = lambda run: lambda *arguments: run(spec, *arguments)
        return Branch("step", bind(self._step)), Branch("whole", bind(self._whole))

    def _rows(self, spec: Spec, canvas: Canvas, scope: Scope, mine: jax.Array) -> RowSet:
        return rows_at(canvas, step_slots(spec, scope, self.first_token), mine)

    def _step(self, spec: Spec, params, cache, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
        """The block's rows attend to what is kept and to themselves."""
        rows = self._rows(spec, canvas, scope, mine)
        hidden = embed_rows(spec.model, params, canvas, rows)
        for layer, kept in enumerate(cache):
            query, key, value = project_rows(spec.model, params, layer, hidden, rows.position)
            keys = jnp.concatenate([kept.keys, key], axis=2)
            values = jnp.concatenate([kept.values, value], axis=2)
            seen = jnp.concatenate([kept.slot, rows.slot], axis=1)
            inside = (seen >= 0) & (seen < spec.length) & take_rows(scope.visible, seen)
            attended, _ = attend(query, keys, values, inside)
            hidden = spec.model.finish(params, layer, hidden, attended)
        return rows_pass(spec, cache, rows, hidden)

    def _whole(self, spec: Spec, params, cache, canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
        """The whole canvas, and what is kept of it."""
        ran = forward_canvas(spec, params, canvas, scope.visible)
        rows = self._rows(spec, canvas, scope, mine)
        layers = [
            self._kept(spec, scope, layer, rows, *features)
            for layer, features in enumerate(zip(ran.queries, ran.keys, ran.values, strict=True))
        ]
        return whole_pass(spec, replace_mine(mine, cache, tuple(layers)), canvas, scope, ran.output)

    def _kept(
        self, spec: Spec, scope: Scope, layer: int, rows: RowSet, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> KeptLayer:
        """What a layer keeps of `key`, `value` `[B, Hkv, N, A]`: what `query` `[B, N, H, A]` points to at `rows`."""
        outside = scope.visible & (count_rows(spec, rows.slot, rows.valid) == 0)
        slot = slots_of(outside, spec.length)  # pooling has what is left and right of the block as neighbours
        importance = take_rows(importance_of(take_rows(query, rows.slot), rows.valid, key), slot)
        importance = pooled(jnp.where(slot < spec.length, importance, -jnp.inf), self.kernel)
        importance = jnp.where(slot < spec.length, importance, -jnp.inf)
        best = self.most_important(importance, slot, scope, layer)
        counts = np.array([int(self.keep_ratio * count) for count in range(spec.length + 1)], np.int32)
        kept = iota(best.shape[1]) < jnp.asarray(counts)[outside.sum(axis=1)][:, None]
        slot = jnp.where(kept, take_rows(slot, best), spec.length)
        pick = lambda cached: jnp.take_along_axis(cached, slot[:, None, :, None], axis=2, mode="clip")
        return KeptLayer(pick(key), pick(value), slot)

    def most_important(self, importance: jax.Array, slot: jax.Array, scope: Scope, layer: int) -> jax.Array:
        """int32 `[B, C]`: places in descending order of `importance` `[B, N]`, the first of equals first."""
        return jax.lax.top_k(importance, int(self.keep_ratio * importance.shape[1]))[1]

    def kind(self, spec: Spec, cache, scope: Scope) -> jax.Array:
        return (scope.phase < 2).astype(jnp.int32)


def sparse_dllm(
    *,
    keep_ratio: float = 0.5,
    kernel: int = 3,
    first_token: FirstToken = "exact",
    steps: int | None = None,
    threshold: float | None = None,
    factor: float | None = None,
    block_length: int = 32,
) -> Method:
    """Sparse-dLLM; the defaults are the authors' evaluation settings (their class has keep_ratio 0.7).

    Args:
      keep_ratio: r, share of the keys outside the block that is kept.
      kernel: neighbours that the importance of a key is pooled over; 1 for none.
      first_token: of models with shifted logits only: "entry" is the original's habit on Dream, to commit a block's
        first position, and nothing else, at the block's entry.
      steps: forwards of LLaDA's fixed schedule, one per token if None.
      threshold, factor: commit in parallel instead, as in `parallel`.
      block_length: S.
    """
    rule = quota_or_confidence(steps, threshold, factor)
    return Method(
        name="sparse_dllm",
        cache=PrunedCache(keep_ratio, kernel, first_token),
        rule=FirstTokenAtEntry(rule) if first_token == "entry" else rule,
        schedule=SemiAutoregressive(block_length=block_length),
        sampler=Greedy(),
    )
