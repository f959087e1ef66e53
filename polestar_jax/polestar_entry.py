"""Block entries: the forward that fills the cache, then the window clustered and coded (algorithm 1, lines 5-13)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from polestar_jax.attention_signals import with_attention
from polestar_jax.cluster import sample_draws, spherical_kmeans
from polestar_jax.offload import fetch, store
from polestar_jax.polestar_step import measure_drift, proxy_drift, with_drift
from polestar_jax.rows import (
    block_slots,
    forward_canvas,
    forward_rows,
    replace_mine,
    rows_at,
    rows_pass,
    take_rows,
    whole_pass,
)
from polestar_jax.types import Canvas, Pass, Scope, Spec
from polestar_jax.window import Windows, window_slots

if TYPE_CHECKING:
    from polestar_jax.polestar_cache import PolestarCache, PolestarState


def full_entry(
    policy: PolestarCache, spec: Spec, params, cache: PolestarState, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """Recomputes the whole canvas, then clusters and codes the window."""
    slot, region = window_slots(spec, canvas, scope, *policy.window(spec))
    cached = (cache.keys, cache.values, mine)
    ran = forward_canvas(spec, params, canvas, scope.visible, cached=cached, kept=slot)
    cache = dataclasses.replace(cache, keys=ran.keys, values=ran.values)
    done = whole_pass(spec, cache, canvas, scope, ran.output)
    query = take_rows(ran.query, done.slot)
    done = _enter(policy, spec, params, done, canvas, scope, mine, slot, region, ran.inputs, query)
    return with_attention(spec, policy.attention_layers, done, ran.queries, ran.keys, None, scope)


def window_entry(
    policy: PolestarCache, spec: Spec, params, cache: PolestarState, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """Recomputes the block's and the window's rows against the cache, then clusters and codes the window."""
    slot, region = window_slots(spec, canvas, scope, *policy.window(spec))
    block = block_slots(spec, scope)
    rows = rows_at(canvas, jnp.concatenate([block, slot], axis=1), mine)
    ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
    width = block.shape[1]
    inputs = [hidden[:, width:] for hidden in ran.inputs]
    done = rows_pass(spec, dataclasses.replace(cache, keys=ran.keys, values=ran.values), rows, ran.output)
    done = done._replace(hidden=done.hidden[:, :width], slot=block, valid=done.valid[:, :width])
    done = _enter(policy, spec, params, done, canvas, scope, mine, slot, region, inputs, ran.query[:, :width])
    queries, seen = [query[:, :width] for query in ran.queries], (block, done.valid)
    return with_attention(spec, policy.attention_layers, done, queries, ran.keys, seen, scope)


def _enter(
    policy: PolestarCache,
    spec: Spec,
    params,
    done: Pass,
    canvas: Canvas,
    scope: Scope,
    mine: jax.Array,
    slot: jax.Array,
    region: jax.Array,
    inputs: list[jax.Array],
    query: jax.Array,
) -> Pass:
    """Clusters the window's layer `inputs` `[B, W, D]`, codes them, and takes the references of later drifts.

    K-means runs once for all layers: the same program per layer would be most of what is compiled.
    """
    cache: PolestarState = done.cache
    done = with_drift(spec, done, measure_drift(policy, spec, cache, query, scope), mine)
    cache = done.cache
    stacked = jnp.stack(inputs)
    clusters = _cluster(policy, spec, scope, stacked, region)
    anchors = clusters.centroids if policy.anchored else None
    code, codes, references = policy.coder(spec), [], []
    for layer in range(spec.model.config.layers):
        anchor = None if anchors is None else anchors[layer]
        held = fetch(policy.offload, cache.windows.codes[layer])
        coded = replace_mine(mine, held, code(stacked[layer], anchor, clusters.labels[layer]))
        codes.append(store(policy.offload, coded))
        proxies, _, _ = spec.model.project(params, layer, clusters.centroids[layer].astype(stacked.dtype))
        old = cache.windows.layer(layer).reference
        references.append(proxy_drift(policy, spec, proxies, cache.keys[layer], canvas, scope, old)[1])
    layers = lambda leaf: leaf.swapaxes(0, 1)
    windows = Windows(
        codes=tuple(codes),
        scores=tuple(reference.scores for reference in references),
        anchors=layers(anchors) if policy.anchored else None,
        centroids=layers(clusters.centroids),
        labels=layers(clusters.labels),
        counts=layers(clusters.counts),
        log_sum=jnp.stack([reference.log_sum for reference in references], axis=1),
    )
    fresh = dataclasses.replace(
        cache,
        windows=windows,
        slot=slot,
        region=region,
        token=take_rows(canvas.tokens, slot),
        running=jnp.zeros_like(cache.running),
    )
    old = dataclasses.replace(cache, windows=dataclasses.replace(cache.windows, codes=windows.codes))
    small = ("windows", "slot", "region", "token", "running")
    kept = {name: replace_mine(mine, getattr(old, name), getattr(fresh, name)) for name in small}
    return done._replace(cache=dataclasses.replace(cache, **kept))


def _cluster(policy: PolestarCache, spec: Spec, scope: Scope, stacked: jax.Array, region: jax.Array):
    """Spherical k-means of `stacked` `[L, B, W, D]`; leaves of the result lead with `[L, B]`."""
    layers = stacked.shape[0]
    draws = None
    if policy.random_start and policy.draws is None:
        fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None), out_axes=1)
        keys = fold(scope.keys, jnp.arange(layers, dtype=jnp.int32))
        sample = lambda key, region: sample_draws(key, region, policy.clusters, policy.iterations)
        draws = jax.vmap(jax.vmap(sample), (0, None))(keys, region)
    elif policy.draws is not None:
        block = jax.vmap(lambda recorded, index: jax.tree.map(lambda leaf: leaf[index], recorded), (0, 0), 1)
        draws = block(policy.draws, scope.index)
    run = lambda rows, region, draws: spherical_kmeans(
        rows,
        region,
        policy.clusters,
        policy.iterations,
        suffixless_keeps_all=policy.suffixless_keeps_all,
        epsilon=policy.epsilon,
        draws=draws,
    )
    over_batch = jax.vmap(run, (0, 0, None if draws is None else 0))
    return jax.vmap(over_batch, (0, None, None if draws is None else 0))(stacked, region, draws)
