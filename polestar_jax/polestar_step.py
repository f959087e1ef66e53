"""The forwards inside a block: a plain step, and a refresh of what drifted (algorithm 1, lines 14-26)."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.drift_reference import DriftReference
from polestar_jax import kernels
from polestar_jax.attention import attend, attention_scores, project_rows, unrotated, write_cache
from polestar_jax.attention_signals import with_attention
from polestar_jax.cluster import OUTSIDE
from polestar_jax.drift import as_reference, drift, log_attention
from polestar_jax.kernels import implementation
from polestar_jax.offload import fetch, store
from polestar_jax.rows import (
    block_slots,
    embed_rows,
    forward_rows,
    iota,
    put_rows,
    replace_mine,
    rows_at,
    rows_pass,
    take_rows,
)
from polestar_jax.types import Canvas, Pass, RowSet, Scope, Spec
from polestar_jax.window import decode_rows, patch, rank_rows, select_rows

if TYPE_CHECKING:
    from polestar_jax.polestar_cache import PolestarCache, PolestarState


def step(
    policy: PolestarCache, spec: Spec, params, cache: PolestarState, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """Recomputes the block's rows."""
    rows = rows_at(canvas, block_slots(spec, scope), mine)
    last = None if cache.attention is None else functools.partial(attend_measuring, policy, spec, cache.attention)
    ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible, last=last)
    cache = dataclasses.replace(cache, keys=ran.keys, values=ran.values)
    done = with_drift(spec, rows_pass(spec, cache, rows, ran.output), ran.seen[-1], mine)
    seen = (rows.slot, rows.valid)
    return with_attention(spec, policy.attention_layers, done, ran.queries, ran.keys, seen, scope)


def attend_measuring(
    policy: PolestarCache, spec: Spec, old: DriftReference, query: jax.Array, key: jax.Array, value: jax.Array, key_mask
) -> tuple[jax.Array, tuple[jax.Array, DriftReference]]:
    """Attention of the block's rows, how it moved since `old` (section 4.2), `[B, R]`, and what it is now."""
    done = kernels.attend_measuring(spec, query, key, value, key_mask, old, policy.token_floor)
    if done is not None:
        return done[0], done[1:]
    now = log_attention(attention_scores(query, key, key_mask), policy.mean_heads)
    measured = drift(now, old, policy.token_floor), as_reference(now)
    return attend(query, key, value, key_mask)[0], measured


def with_drift(spec: Spec, done: Pass, measured: tuple[jax.Array, DriftReference] | None, mine: jax.Array) -> Pass:
    """Adds what `attend_measuring` found in the last layer, if the rule asks for drift."""
    extra = {"suffix": jnp.zeros(done.slot.shape, bool)} if "suffix" in spec.needs else {}
    if measured is None:
        return done._replace(extra=extra)
    cache: PolestarState = done.cache
    extra["drift"], now = measured
    attention = replace_mine(mine, cache.attention, now)
    return done._replace(cache=dataclasses.replace(cache, attention=attention), extra=extra)


def measure_drift(
    policy: PolestarCache, spec: Spec, cache: PolestarState, query: jax.Array, scope: Scope
) -> tuple[jax.Array, DriftReference] | None:
    """What `attend_measuring` measures, from the block's queries in the last layer; None if nobody asks."""
    if cache.attention is None:
        return None
    return attend_measuring(policy, spec, cache.attention, query, cache.keys[-1], cache.values[-1], scope.visible)[1]


def refresh(
    policy: PolestarCache, spec: Spec, params, cache: PolestarState, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """A step that also recomputes, layer by layer, the window rows whose clusters drifted most (algorithm 1, 15-26).

    A layer's update packet, the outputs of its selected rows, replaces those rows in the next layer: their hidden
    states, keys and values, and what they add to the centroids. Centroids, block and window rows share one projection.
    """
    model, config = spec.model, spec.model.config
    block = rows_at(canvas, block_slots(spec, scope), mine)
    window = rows_at(canvas, cache.slot, mine)
    inside = (cache.region != OUTSIDE) & mine[:, None]
    hidden = embed_rows(model, params, canvas, block)
    packet = embed_rows(model, params, canvas, window)
    changed = inside & (window.token != cache.token) & policy.refresh_tokens
    keys, values, queries = list(cache.keys), list(cache.values), []
    codes, scores, log_sums, centroids, packets, choices = [], [], [], [], [], []
    # Position 0 is no rotation, which is what proxies want.
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), block, window)
    position = jnp.pad(both.position, ((0, 0), (policy.clusters, 0)))
    proxy, rest = policy.clusters, policy.clusters + block.slot.shape[1]
    sizes = sorted({max(1, round(fraction * window.slot.shape[1])) for fraction in policy.capacities})
    # As kernels read it: in a branch inside the layers it would be converted once more in each.
    visible = scope.visible.astype(jnp.int32)
    # Of all layers at once: in each layer it would be operations of its own.
    ranks = jax.vmap(rank_rows, 1, 1)(cache.windows.labels)
    ahead = fetch(policy.offload, cache.windows.codes[0])
    for layer in range(config.layers):
        old = dataclasses.replace(cache.windows.layer(layer), codes=ahead)
        if layer + 1 < config.layers:
            # On their way once the layer below has chosen its rows, not before: they take memory.
            ahead = fetch(policy.offload, cache.windows.codes[layer + 1], changed)
        rows, moved = patch(old, decode_rows(old, policy.format), packet, changed, policy.epsilon)
        together = jnp.concatenate([moved.astype(hidden.dtype), hidden, rows.astype(hidden.dtype)], axis=1)
        query, key, value = project_rows(model, params, layer, together, position)
        queries.append(query[:, proxy:rest])
        written = dataclasses.replace(both, write=jnp.concatenate([block.write, changed], axis=1))
        keys[layer] = write_cache(keys[layer], written, key[:, :, proxy:])
        values[layer] = write_cache(values[layer], written, value[:, :, proxy:])
        score, reference = proxy_drift(policy, spec, query[:, :proxy], keys[layer], canvas, scope, old.reference)
        last = layer == config.layers - 1
        k = policy.selected_last if last else policy.selected
        selected, place = select_rows(score, old.counts, old.labels, ranks[:, layer], k, policy.memberless)
        selected = selected & inside
        if last and "suffix" not in spec.needs:
            selected = jnp.zeros_like(selected)  # nobody reads the last packet
        coded = policy.coder(spec)(rows, old.anchors, old.labels, kept=(old.codes, changed))
        scores.append(replace_mine(mine, old.reference.scores, reference.scores))
        log_sums.append(reference.log_sum)
        centroids.append(moved)
        outputs, choice = _finish_selected(
            spec,
            lambda inputs, attended, layer=layer: model.finish(params, layer, inputs, attended),
            (keys[layer], values[layer], visible),
            (together, query),
            (selected, place),
            proxy,
            sizes,
        )
        codes.append(store(policy.offload, coded, outputs))
        hidden, packet, changed = outputs[:, : rest - proxy], outputs[:, rest - proxy :], selected
        packets.append(selected)
        choices.append(choice)
    windows = dataclasses.replace(
        cache.windows,
        codes=tuple(codes),
        scores=tuple(scores),
        log_sum=replace_mine(mine, cache.windows.log_sum, jnp.stack(log_sums, axis=1)),
        centroids=replace_mine(mine, cache.windows.centroids, jnp.stack(centroids, axis=1)),
    )
    cache = dataclasses.replace(
        cache,
        keys=tuple(keys),
        values=tuple(values),
        windows=windows,
        token=jnp.where(inside & policy.refresh_tokens, window.token, cache.token),
        running=jnp.where(mine, 0, cache.running),
    )
    # Counted once for all layers: a layer's count would be operations of its own in every layer.
    layers = jnp.concatenate([block.valid * config.layers, jnp.stack(packets).sum(axis=0)], axis=1).astype(jnp.int32)
    computed = put_rows(jnp.zeros_like(canvas.tokens), both.slot, layers, layers > 0)
    executed = block.slot.shape[1] + jnp.asarray(sizes, jnp.float32)[jnp.stack(choices)].mean()
    done = Pass(cache, hidden, block.slot, block.valid, {}, computed, executed)
    done = with_drift(spec, done, measure_drift(policy, spec, cache, queries[-1], scope), mine)
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


def _finish_selected(spec: Spec, finish, cached, rows, chosen, first: int, sizes: list[int]):
    """Attention and feed-forward of the block's rows and of the selected window rows, packed into the least capacity.

    Args:
      finish: a layer's `finish(inputs, attended)`.
      cached: keys, values `[B, Hkv, N, A]` and key mask `[B, N]`.
      rows: layer inputs `[B, first + R + W, D]` and queries `[B, first + R + W, H, A]` of the block and the window.
      chosen: which rows of the window, bool `[B, W]`, and the place of each among them, int32 `[B, W]`.
      first: rows before the block's, which are left alone.
      sizes: capacities, the last one W.

    Returns:
      the outputs `[B, R + W, D]`, which say nothing of window rows that are not selected; which capacity.
    """
    (inputs, query), (selected, place) = rows, chosen
    batch, total = selected.shape
    width = inputs.shape[1] - first - total
    if len(sizes) == 1:
        attended, _ = attend(query[:, first:], *cached, kernels=implementation(spec))
        return finish(inputs[:, first:], attended), jnp.int32(0)
    place = jnp.where(selected, place, total)
    # A comparison of all with all: as a sort it would be several operations.
    order = jnp.where(place[:, None, :] == iota(total).T[None], iota(total)[None], 0).sum(axis=2, dtype=jnp.int32)

    def run(size: int):
        def apply():
            block = jnp.broadcast_to(iota(width), (batch, width))
            index = first + jnp.concatenate([block, width + order[:, :size]], axis=1)
            attended, _ = attend(take_rows(query, index), *cached, kernels=implementation(spec))
            outputs = finish(take_rows(inputs, index), attended)
            return take_rows(outputs, jnp.concatenate([block, width + place], axis=1))

        return apply

    need = selected.sum(axis=1, dtype=jnp.int32).max()
    choice = sum((need > size).astype(jnp.int32) for size in sizes[:-1])
    return jax.lax.switch(choice, [run(size) for size in sizes]), choice


def proxy_drift(
    policy: PolestarCache,
    spec: Spec,
    proxies: jax.Array,
    keys: jax.Array,
    canvas: Canvas,
    scope: Scope,
    old: DriftReference,
) -> tuple[jax.Array, DriftReference]:
    """How far the attention of the centroids moved, `[B, K]`, and what it is now; arguments as in `proxy_attention`."""
    measured = kernels.measure_proxies(spec, proxies, keys, canvas, scope, old, policy.proxy_floor)
    if measured is not None:
        return measured
    now = proxy_attention(policy, spec, proxies, keys, canvas, scope)
    return drift(now, old, policy.proxy_floor), as_reference(now)


def proxy_attention(
    policy: PolestarCache, spec: Spec, proxies: jax.Array, keys: jax.Array, canvas: Canvas, scope: Scope
) -> jax.Array:
    """Log attention `[B, h, K, N]` of centroid queries `[B, K, H, A]` over all keys, no position on either side."""
    plain = unrotated(spec.model, keys, canvas.position)
    return log_attention(attention_scores(proxies, plain, scope.visible), policy.mean_heads)
