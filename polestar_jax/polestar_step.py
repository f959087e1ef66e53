"""The forwards inside a block: a plain step, and a refresh of what drifted (algorithm 1, lines 14-26)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from polestar_jax.attention import attention_scores, project_rows, unrotated, weigh_values, write_cache
from polestar_jax.attention_signals import with_attention
from polestar_jax.cluster import OUTSIDE
from polestar_jax.drift import drift, log_attention
from polestar_jax.kernels import implementation, measure_proxies
from polestar_jax.offload import fetch, store
from polestar_jax.rows import (
    block_slots,
    count_rows,
    embed_rows,
    forward_rows,
    put_rows,
    replace_mine,
    rows_at,
    rows_pass,
    take_rows,
)
from polestar_jax.types import Canvas, Pass, RowSet, Scope, Spec
from polestar_jax.window import decode_rows, members, patch, recode, select_clusters

if TYPE_CHECKING:
    from polestar_jax.polestar_cache import PolestarCache, PolestarState


def step(
    policy: PolestarCache, spec: Spec, params, cache: PolestarState, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """Recomputes the block's rows."""
    rows = rows_at(canvas, block_slots(spec, scope), mine, contiguous=True)
    ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
    cache = dataclasses.replace(cache, keys=ran.keys, values=ran.values)
    done = with_drift(policy, spec, rows_pass(spec, cache, rows, ran.output), ran.query, scope, mine)
    seen = (rows.slot, rows.valid)
    return with_attention(spec, policy.attention_layers, done, ran.queries, ran.keys, seen, scope)


def with_drift(policy: PolestarCache, spec: Spec, done: Pass, query: jax.Array, scope: Scope, mine: jax.Array) -> Pass:
    """Measures how the last layer's attention moved (section 4.2), from the block's queries there."""
    extra = {"suffix": jnp.zeros(done.slot.shape, bool)} if "suffix" in spec.needs else {}
    cache: PolestarState = done.cache
    if cache.attention is None:
        return done._replace(extra=extra)
    now = log_attention(attention_scores(query, cache.keys[-1], scope.visible), policy.mean_heads)
    extra["drift"] = drift(now, cache.attention, policy.token_floor)
    attention = jnp.where(mine[:, None, None, None], now, cache.attention)
    return done._replace(cache=dataclasses.replace(cache, attention=attention), extra=extra)


def refresh(
    policy: PolestarCache, spec: Spec, params, cache: PolestarState, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """A step that also recomputes, layer by layer, the window rows whose clusters drifted most (algorithm 1, 15-26).

    A layer's update packet, the outputs of its selected rows, replaces those rows in the next layer: their hidden
    states, keys and values, and what they add to the centroids. Centroids, block and window rows share one projection.
    """
    model, config = spec.model, spec.model.config
    block = rows_at(canvas, block_slots(spec, scope), mine, contiguous=True)
    window = rows_at(canvas, cache.slot, mine)
    inside = (cache.region != OUTSIDE) & mine[:, None]
    hidden = embed_rows(model, params, canvas, block)
    packet = embed_rows(model, params, canvas, window)
    changed = inside & (window.token != cache.token) & policy.refresh_tokens
    keys, values, windows, queries = list(cache.keys), list(cache.values), [], []
    computed = count_rows(spec, block.slot, block.valid) * config.layers
    executed, query = jnp.float32(0), hidden
    # Position 0 is no rotation, which is what proxies want.
    position = jnp.concatenate([block.position, window.position], axis=1)
    position = jnp.pad(position, ((0, 0), (policy.clusters, 0)))
    proxy, rest = policy.clusters, policy.clusters + block.slot.shape[1]
    ahead = fetch(policy.offload, cache.windows[0])
    for layer in range(config.layers):
        old = ahead
        if layer + 1 < config.layers:
            # A layer's codes are on their way while the layer below is computed, not before: they take memory.
            ahead = fetch(policy.offload, cache.windows[layer + 1], hidden)
        rows, centroids = patch(old, decode_rows(old, policy.format), packet, changed, policy.epsilon)
        together = jnp.concatenate([centroids.astype(hidden.dtype), hidden, rows.astype(hidden.dtype)], axis=1)
        query, key, value = project_rows(model, params, layer, together, position)
        queries.append(query[:, proxy:rest])
        for cached, fresh in ((keys, key), (values, value)):
            cached[layer] = write_cache(cached[layer], block, fresh[:, :, proxy:rest])
            cached[layer] = write_cache(cached[layer], window, fresh[:, :, rest:], changed)
        score, reference = _proxy_drift(policy, spec, query[:, :proxy], keys[layer], canvas, scope, old.reference)
        last = layer == config.layers - 1
        k = policy.selected_last if last else policy.selected
        chosen = select_clusters(score, old.counts, k, policy.memberless)
        selected = members(chosen, old.labels) & inside
        if last and "suffix" not in spec.needs:
            selected = jnp.zeros_like(selected)  # nobody reads the last packet
        codes = recode(old, rows, changed, policy.format, policy.tensor_scale, implementation(spec))
        fresh_window = dataclasses.replace(old, codes=codes, centroids=centroids, reference=reference)
        windows.append(store(policy.offload, replace_mine(mine, old, fresh_window)))
        hidden, packet, ran = _finish_selected(
            policy,
            lambda inputs, attended, layer=layer: model.finish(params, layer, inputs, attended),
            (keys[layer], values[layer], scope.visible),
            (hidden, query[:, proxy:rest]),
            (rows.astype(hidden.dtype), query[:, rest:], selected),
        )
        changed = selected
        computed += count_rows(spec, window.slot, selected)
        executed += ran
    cache = dataclasses.replace(
        cache,
        keys=tuple(keys),
        values=tuple(values),
        windows=tuple(windows),
        token=jnp.where(inside & policy.refresh_tokens, window.token, cache.token),
        running=jnp.where(mine, 0, cache.running),
    )
    done = Pass(cache, hidden, block.slot, block.valid, {}, computed, executed / config.layers)
    done = with_drift(policy, spec, done, queries[-1], scope, mine)
    done = with_attention(spec, policy.attention_layers, done, queries, keys, (block.slot, block.valid), scope)
    return _with_suffix(policy, spec, done, packet, window, changed, scope) if "suffix" in spec.needs else done


def _with_suffix(
    policy: PolestarCache, spec: Spec, done: Pass, packet: jax.Array, window: RowSet, selected: jax.Array, scope: Scope
) -> Pass:
    """Adds the suffix rows of the last packet to the rows that predict (section 4.2, suffix block commit).

    With shifted logits the block's last row predicts the first suffix position, and the window's last one a position
    beyond the window, which nobody commits.
    """
    prefix, suffix = policy.window(spec)
    join = lambda a, b: jnp.concatenate([a, b], axis=1)
    slot = join(done.slot, window.slot[:, prefix:])
    ahead = slot + spec.model.shift - scope.stop[:, None]
    extra = {"suffix": (ahead >= 0) & (ahead < suffix)}
    if "drift" in done.extra:
        unmeasured = jnp.full(slot[:, done.slot.shape[1] :].shape, jnp.nan, jnp.float32)
        extra["drift"] = join(done.extra["drift"], unmeasured)
    return done._replace(
        hidden=join(done.hidden, packet[:, prefix:]),
        slot=slot,
        valid=join(done.valid, selected[:, prefix:]),
        extra=extra,
    )


def _finish_selected(policy: PolestarCache, finish, cached, block, window):
    """Attention and feed-forward of the block's rows and of the selected window rows, packed into the least capacity.

    Args:
      finish: a layer's `finish(inputs, attended)`.
      cached: keys, values `[B, Hkv, N, A]` and key mask `[B, N]`.
      block: layer inputs `[B, R, D]` and queries `[B, R, H, A]`.
      window: layer inputs `[B, W, D]`, queries and bool `[B, W]`, the selected rows.

    Returns:
      the block's outputs; the packet `[B, W, D]`, zero where not selected; rows run, float32 `[]`.
    """
    (key, value, mask), (hidden, query), (rows, row_query, selected) = cached, block, window
    width, total = hidden.shape[1], rows.shape[1]
    sizes = sorted({max(1, round(fraction * total)) for fraction in policy.capacities})
    order = jnp.argsort(~selected, axis=1, stable=True)

    def run(size: int):
        def apply():
            index = order[:, :size]
            inputs = jnp.concatenate([hidden, take_rows(rows, index)], axis=1)
            queries = jnp.concatenate([query, take_rows(row_query, index)], axis=1)
            weights = jax.nn.softmax(attention_scores(queries, key, mask), axis=-1)
            outputs = finish(inputs, weigh_values(weights, value))
            packet = put_rows(jnp.zeros_like(rows), index, outputs[:, width:], take_rows(selected, index))
            return outputs[:, :width], packet, jnp.float32(width + size)

        return apply

    need = selected.sum(axis=1).max()
    choice = sum((need > size).astype(jnp.int32) for size in sizes[:-1])
    return jax.lax.switch(choice, [run(size) for size in sizes]) if len(sizes) > 1 else run(sizes[0])()


def _proxy_drift(
    policy: PolestarCache, spec: Spec, proxies: jax.Array, keys: jax.Array, canvas: Canvas, scope: Scope, old: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How far the attention of the centroids moved, `[B, K]`, and what it is now; arguments as in `proxy_attention`."""
    measured = measure_proxies(spec, proxies, keys, canvas, scope, old, policy.proxy_floor)
    if measured is not None:
        return measured
    now = proxy_attention(policy, spec, proxies, keys, canvas, scope)
    return drift(now, old, policy.proxy_floor), now


def proxy_attention(
    policy: PolestarCache, spec: Spec, proxies: jax.Array, keys: jax.Array, canvas: Canvas, scope: Scope
) -> jax.Array:
    """Log attention `[B, h, K, N]` of centroid queries `[B, K, H, A]` over all keys, no position on either side."""
    plain = unrotated(spec.model, keys, canvas.position)
    return log_attention(attention_scores(proxies, plain, scope.visible), policy.mean_heads)
