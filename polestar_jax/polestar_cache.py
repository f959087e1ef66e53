"""Polestar-Cache (paper section 4.1): block-wise KV reuse with sparse refreshes of what drifted in the local window."""

import dataclasses

import jax
import jax.numpy as jnp

from polestar_jax.cluster import OUTSIDE, Draws, sample_draws, spherical_kmeans
from polestar_jax.drift import Floor, drift, log_attention
from polestar_jax.quantize import FORMATS, Format, quantize
from polestar_jax.rows import (
    attention_scores,
    block_slots,
    count_rows,
    embed_rows,
    empty_keys_values,
    forward_canvas,
    forward_rows,
    project_rows,
    put_rows,
    replace_mine,
    rows_at,
    rows_pass,
    take_rows,
    weigh_values,
    whole_pass,
)
from polestar_jax.types import (
    Branch,
    Canvas,
    Commits,
    Pass,
    Prediction,
    Reason,
    RowSet,
    Scope,
    Signal,
    Spec,
    pytree,
    static,
)
from polestar_jax.window import (
    LayerWindow,
    decode_rows,
    encode,
    members,
    patch,
    recode,
    select_clusters,
    window_slots,
)

STEP, REFRESH, WINDOW_ENTRY, FULL_ENTRY = range(4)


@pytree
class PolestarState:
    """Everything Polestar-Cache remembers.

    Attributes:
      keys, values: per layer `[B, N, Hkv, A]`, keys rotated.
      windows: per layer.
      slot: int32 `[B, W]`, the window's slots.
      region: int32 `[B, W]`.
      token: int32 `[B, W]`, the tokens that layer 0's rows were made from.
      attention: float32 `[B, h, R, N]`, log attention of the block's rows in the last layer at the last forward; None if
        no rule asks for drift.
      running, last: int32 `[B]`, block commits since and including the last refresh or entry; of the last forward.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    windows: tuple[LayerWindow, ...]
    slot: jax.Array
    region: jax.Array
    token: jax.Array
    attention: jax.Array | None
    running: jax.Array
    last: jax.Array


@pytree
class PolestarCache:
    """When and where stale rows are recomputed.

    Attributes:
      selected: k, clusters refreshed per layer.
      selected_last: the same for the last layer, whose packet only serves suffix commits.
      update_threshold: tau_upd; a refresh follows when more tokens were committed since the last one.
      step_threshold: a refresh follows a single forward that committed more than this (the release's own trigger; in the
        paper's reading the running count covers it).
      window_entry_period: every so many blocks the last one is entered with window and block rows only; 2 is the
        paper's "every alternate block", 0 enters every block with a full-sequence forward.
      clusters: K.
      iterations: of k-means.
      prefix_blocks, suffix_blocks: the local window, in blocks; the paper's (2, 1).
      format: of the window's hidden states (table 11).
      residual: code residuals to the centroids, not the rows.
      tensor_scale: a second float32 scale of NVFP4, as NVIDIA's format has.
      capacities: fractions of the window that a refresh's row set is compiled for; the smallest that holds is run.
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
    capacities: tuple[float, ...] = static(default=(0.5, 1.0))
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
        return frozenset({"drift", "suffix"})

    def problems(self, spec: Spec) -> list[str]:
        found = []
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
        if self.format not in FORMATS:
            found.append(f"format={self.format!r} must be one of {', '.join(FORMATS)}")
        else:
            try:
                size = spec.model.config.model_size
                jax.eval_shape(
                    lambda: quantize(jnp.zeros((1, size)), self.format, tensor_scale=self.tensor_scale)
                )
            except ValueError as error:
                found.append(str(error))
        return found

    def _window(self, spec: Spec) -> tuple[int, int]:
        """Slots before and after the block; more than a canvas of them would only be padding."""
        whole = spec.length
        return min(self.prefix_blocks * spec.span, whole), min(self.suffix_blocks * spec.span, spec.gen_length)

    def width(self, spec: Spec) -> int:
        return spec.span + spec.model.shift + (self._window(spec)[1] if "suffix" in spec.needs else 0)

    def init(self, spec: Spec) -> PolestarState:
        config = spec.model.config
        keys, values = empty_keys_values(spec)
        window = sum(self._window(spec))
        heads = 1 if self.mean_heads else config.heads
        rows = jnp.zeros((spec.batch, window, config.model_size), config.dtype)
        labels = jnp.full((spec.batch, window), OUTSIDE, jnp.int32)
        centroids = jnp.zeros((spec.batch, self.clusters, config.model_size), jnp.float32)
        anchors = centroids if self._anchored else None
        layer = LayerWindow(
            codes=encode(rows, anchors, labels, self.format, self.tensor_scale),
            anchors=anchors,
            centroids=centroids,
            labels=labels,
            counts=jnp.zeros((spec.batch, self.clusters), jnp.int32),
            reference=jnp.zeros((spec.batch, heads, self.clusters, spec.length), jnp.float32),
        )
        attention = (spec.batch, heads, spec.span + spec.model.shift, spec.length)
        zeros = jnp.zeros((spec.batch,), jnp.int32)
        return PolestarState(
            keys=keys,
            values=values,
            windows=(layer,) * config.layers,
            slot=jnp.zeros_like(labels),
            region=labels,
            token=jnp.zeros_like(labels),
            attention=jnp.zeros(attention, jnp.float32) if "drift" in spec.needs else None,
            running=zeros,
            last=zeros,
        )

    @property
    def _anchored(self) -> bool:
        # Rows that are not coded need no anchor, and adding one would round them.
        return self.residual and self.format != "none"

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        bind = lambda run: lambda *arguments: run(self, spec, *arguments)
        return (
            Branch("step", bind(_step)),
            Branch("refresh", bind(_refresh)),
            Branch("window entry", bind(_window_entry)),
            Branch("full entry", bind(_full_entry)),
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


def _step(
    policy: PolestarCache, spec: Spec, params, cache: PolestarState, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """Recomputes the block's rows."""
    rows = rows_at(canvas, block_slots(spec, scope), mine)
    ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
    cache = dataclasses.replace(cache, keys=ran.keys, values=ran.values)
    done = rows_pass(spec, cache, rows, ran.inputs[-1])
    return _with_drift(policy, spec, done, ran.query, scope, mine)


def _with_drift(policy: PolestarCache, spec: Spec, done: Pass, query: jax.Array, scope: Scope, mine: jax.Array) -> Pass:
    """Measures how the last layer's attention moved (section 4.2), from the block's queries there."""
    extra = {"suffix": jnp.zeros(done.slot.shape, bool)} if "suffix" in spec.needs else {}
    cache: PolestarState = done.cache
    if cache.attention is None:
        return done._replace(extra=extra)
    now = log_attention(attention_scores(query, cache.keys[-1], scope.visible), policy.mean_heads)
    extra["drift"] = drift(now, cache.attention, policy.token_floor)
    attention = jnp.where(mine[:, None, None, None], now, cache.attention)
    return done._replace(cache=dataclasses.replace(cache, attention=attention), extra=extra)


def _full_entry(
    policy: PolestarCache, spec: Spec, params, cache: PolestarState, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """Recomputes the whole canvas, then clusters and codes the window."""
    ran = forward_canvas(spec, params, canvas, scope.visible)
    slot, region = window_slots(spec, canvas, scope, *policy._window(spec))
    inputs = [take_rows(hidden, slot) for hidden in ran.inputs[:-1]]
    cache = dataclasses.replace(
        cache, keys=replace_mine(mine, cache.keys, ran.keys), values=replace_mine(mine, cache.values, ran.values)
    )
    done = whole_pass(spec, cache, canvas, scope, ran.inputs[-1])
    query = take_rows(ran.query, done.slot)
    return _enter(policy, spec, params, done, canvas, scope, mine, slot, region, inputs, query)


def _window_entry(
    policy: PolestarCache, spec: Spec, params, cache: PolestarState, canvas: Canvas, scope: Scope, mine: jax.Array
) -> Pass:
    """Recomputes the block's and the window's rows against the cache, then clusters and codes the window."""
    slot, region = window_slots(spec, canvas, scope, *policy._window(spec))
    block = block_slots(spec, scope)
    rows = rows_at(canvas, jnp.concatenate([block, slot], axis=1), mine)
    ran = forward_rows(spec, params, cache.keys, cache.values, canvas, rows, scope.visible)
    width = block.shape[1]
    inputs = [hidden[:, width:] for hidden in ran.inputs[:-1]]
    done = rows_pass(spec, dataclasses.replace(cache, keys=ran.keys, values=ran.values), rows, ran.inputs[-1])
    done = done._replace(hidden=done.hidden[:, :width], slot=block, valid=done.valid[:, :width])
    return _enter(policy, spec, params, done, canvas, scope, mine, slot, region, inputs, ran.query[:, :width])


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
    """Clusters the window's layer `inputs` `[B, W, D]`, codes them, and takes the references that drift is measured from.

    K-means runs once for all layers: the same program per layer would be most of what is compiled.
    """
    done = _with_drift(policy, spec, done, query, scope, mine)
    cache: PolestarState = done.cache
    stacked = jnp.stack(inputs)
    clusters = _cluster(policy, spec, scope, stacked, region)
    anchors = clusters.centroids if policy._anchored else None
    codes = encode(stacked, anchors, clusters.labels, policy.format, policy.tensor_scale)
    windows = []
    for layer in range(spec.model.config.layers):
        centroids = clusters.centroids[layer]
        proxies, _, _ = spec.model.project(params, layer, centroids.astype(stacked.dtype))
        reference = _proxy_attention(policy, spec, proxies, cache.keys[layer], canvas, scope)
        at = lambda tree, layer=layer: jax.tree.map(lambda leaf: leaf[layer], tree)
        windows.append(
            LayerWindow(at(codes), at(anchors), centroids, clusters.labels[layer], clusters.counts[layer], reference)
        )
    fresh = dataclasses.replace(
        cache,
        windows=tuple(windows),
        slot=slot,
        region=region,
        token=take_rows(canvas.tokens, slot),
        running=jnp.zeros_like(cache.running),
    )
    small = ("windows", "slot", "region", "token", "running")
    kept = {name: replace_mine(mine, getattr(cache, name), getattr(fresh, name)) for name in small}
    return done._replace(cache=dataclasses.replace(cache, **kept))


def _cluster(policy: PolestarCache, spec: Spec, scope: Scope, stacked: jax.Array, region: jax.Array):
    """Spherical k-means of `stacked` `[L, B, W, D]`; leaves of the result lead with `[L, B]`."""
    layers, batch = stacked.shape[:2]
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


def _proxy_attention(
    policy: PolestarCache, spec: Spec, proxies: jax.Array, keys: jax.Array, canvas: Canvas, scope: Scope
) -> jax.Array:
    """Log attention `[B, h, K, N]` of centroid queries `[B, K, H, A]` over all keys, without position on either side."""
    unrotated = spec.model.rotate(keys, -canvas.position)
    return log_attention(attention_scores(proxies, unrotated, scope.visible), policy.mean_heads)


def _refresh(
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
    keys, values, windows = list(cache.keys), list(cache.values), []
    computed = count_rows(spec, block.slot, block.valid) * config.layers
    executed, query = jnp.float32(0), None
    position = jnp.concatenate([jnp.zeros_like(block.position[:, :1]).repeat(policy.clusters, 1), block.position,
                                window.position], axis=1)  # fmt: skip
    proxy, rest = policy.clusters, policy.clusters + block.slot.shape[1]
    for layer in range(config.layers):
        old = cache.windows[layer]
        rows, centroids = patch(old, decode_rows(old, policy.format), packet, changed, policy.epsilon)
        together = jnp.concatenate([centroids.astype(hidden.dtype), hidden, rows.astype(hidden.dtype)], axis=1)
        # Position 0 is no rotation, which is what proxies want.
        query, key, value = project_rows(model, params, layer, together, position)
        for cached, fresh in ((keys, key), (values, value)):
            cached[layer] = put_rows(cached[layer], block.slot, fresh[:, proxy:rest], block.write)
            cached[layer] = put_rows(cached[layer], window.slot, fresh[:, rest:], changed)
        reference = _proxy_attention(policy, spec, query[:, :proxy], keys[layer], canvas, scope)
        score = drift(reference, old.reference, policy.proxy_floor)
        last = layer == config.layers - 1
        k = policy.selected_last if last else policy.selected
        chosen = select_clusters(score, old.counts, k, policy.memberless)
        selected = members(chosen, old.labels) & inside
        if last and "suffix" not in spec.needs:
            selected = jnp.zeros_like(selected)  # nobody reads the last packet
        codes = recode(old, rows, changed, policy.format, policy.tensor_scale)
        fresh_window = dataclasses.replace(old, codes=codes, centroids=centroids, reference=reference)
        windows.append(replace_mine(mine, old, fresh_window))
        hidden, packet, ran = _finish_selected(
            policy,
            lambda inputs, attended, layer=layer: model.finish(params, layer, inputs, attended),
            (keys[layer], values[layer], scope.visible),
            (hidden, query[:, proxy:rest]),
            (rows.astype(hidden.dtype), query[:, rest:], selected),
        )
        changed = selected
        computed += count_rows(spec, window.slot, selected)
        executed += ran / config.layers
    cache = dataclasses.replace(
        cache,
        keys=tuple(keys),
        values=tuple(values),
        windows=tuple(windows),
        token=jnp.where(inside & policy.refresh_tokens, window.token, cache.token),
        running=jnp.where(mine, 0, cache.running),
    )
    done = Pass(cache, hidden, block.slot, block.valid, {}, computed, executed)
    done = _with_drift(policy, spec, done, query[:, proxy:rest], scope, mine)
    return _with_suffix(policy, spec, done, packet, window, changed, scope) if "suffix" in spec.needs else done


def _with_suffix(
    policy: PolestarCache, spec: Spec, done: Pass, packet: jax.Array, window: RowSet, selected: jax.Array, scope: Scope
) -> Pass:
    """Adds the suffix rows of the last packet to the rows that predict (section 4.2, suffix block commit)."""
    prefix = policy._window(spec)[0]
    join = lambda a, b: jnp.concatenate([a, b], axis=1)
    slot = join(done.slot, window.slot[:, prefix:])
    extra = {"suffix": slot + spec.model.shift >= scope.stop[:, None]}
    if "drift" in done.extra:
        extra["drift"] = join(done.extra["drift"], jnp.zeros(slot[:, done.slot.shape[1] :].shape, jnp.float32))
    return done._replace(
        hidden=join(done.hidden, packet[:, prefix:]), slot=slot, valid=join(done.valid, selected[:, prefix:]), extra=extra
    )


def _finish_selected(policy: PolestarCache, finish, cached, block, window):
    """Attention and feed-forward of the block's rows and of the selected window rows, packed into the least capacity.

    Args:
      finish: a layer's `finish(inputs, attended)`.
      cached: keys, values `[B, N, Hkv, A]` and key mask `[B, N]`.
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
