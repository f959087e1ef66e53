"""The cache policy of methods that check their tokens: a shadow of the block, blind to what it predicts."""

import jax
import jax.numpy as jnp

from polestar_jax.attention import attend, project_rows
from polestar_jax.policy import Policy
from polestar_jax.rows import embed_rows, iota, rows_at, take_rows, whole_pass
from polestar_jax.types import Branch, Canvas, Pass, Scope, Signal, Spec, pytree


@pytree
class ShadowBlock(Policy):
    """Every forward recomputes the whole canvas and S more rows, of [MASK] tokens at the block's positions.

    Nobody attends to the shadow but the shadow; a shadow row attends to the shadow and to all of the canvas but the
    position that it predicts. The signal "shadow" is its probability of the token that stands there. Where logits are
    shifted, the shadow row that predicts a position sits one before it, like every other row.
    """

    @property
    def provides(self) -> frozenset[Signal]:
        return frozenset({"shadow"})

    def problems(self, spec: Spec) -> list[str]:
        return []

    def width(self, spec: Spec) -> int:
        return spec.span + spec.model.shift

    def init(self, spec: Spec) -> tuple[()]:
        return ()

    def branches(self, spec: Spec) -> tuple[Branch, ...]:
        return (Branch("full", lambda *arguments: shadowed_forward(spec, *arguments)),)

    def kind(self, spec: Spec, cache: tuple[()], scope: Scope) -> jax.Array:
        return jnp.zeros_like(scope.index)


def shadow_slots(spec: Spec, scope: Scope) -> tuple[jax.Array, jax.Array]:
    """The slots `[B, S]` that the shadow's rows predict, and which rows there are: blocks may be shorter than S."""
    predicted = scope.start[:, None] + iota(spec.span)
    return predicted, predicted < scope.stop[:, None]


def shadow_keys(spec: Spec, scope: Scope) -> jax.Array:
    """bool `[B, S, N + S]`: what the shadow's rows see, key slots N to N + S being the shadow."""
    predicted, valid = shadow_slots(spec, scope)
    in_canvas = scope.visible[:, None, :] & (iota(spec.length)[None] != predicted[..., None])
    in_shadow = jnp.broadcast_to(valid[:, None, :], (*predicted.shape, spec.span))
    return jnp.concatenate([in_canvas, in_shadow], axis=2)


def shadowed_outputs(spec: Spec, params, canvas: Canvas, scope: Scope) -> jax.Array:
    """Last outputs `[B, N + S, D]` of the canvas, as `forward_canvas` has them, and of the shadow."""
    model, length = spec.model, spec.length
    predicted, _ = shadow_slots(spec, scope)
    keys = shadow_keys(spec, scope)
    everyone = rows_at(canvas, jnp.broadcast_to(iota(length), canvas.tokens.shape), scope.entering)
    masks = model.embed(params, jnp.full_like(predicted, model.config.mask_id))
    position = jnp.concatenate([canvas.position, take_rows(canvas.position, predicted - model.shift)], axis=1)
    hidden = jnp.concatenate([embed_rows(model, params, canvas, everyone), masks], axis=1)
    for layer in range(model.config.layers):
        query, key, value = project_rows(model, params, layer, hidden, position)
        in_canvas, _ = attend(query[:, :length], key[:, :, :length], value[:, :, :length], scope.visible)
        in_shadow, _ = attend(query[:, length:], key, value, keys)
        hidden = model.finish(params, layer, hidden, jnp.concatenate([in_canvas, in_shadow], axis=1))
    return hidden


def shadowed_forward(spec: Spec, params, cache: tuple[()], canvas: Canvas, scope: Scope, mine: jax.Array) -> Pass:
    """Predictions of the block, and what its shadow thinks of the tokens that stand in it."""
    model, length = spec.model, spec.length
    predicted, valid = shadow_slots(spec, scope)
    hidden = shadowed_outputs(spec, params, canvas, scope)
    done = whole_pass(spec, cache, canvas, scope, hidden[:, :length])
    logits = model.logits(params, hidden[:, length:]).astype(jnp.float32)
    standing = take_rows(canvas.tokens, predicted)
    standing = jnp.take_along_axis(logits, standing[..., None], axis=-1)[..., 0]
    probability = jnp.exp(standing - jax.nn.logsumexp(logits, axis=-1))
    # Rows that predict come first to last; where logits are shifted the last one predicts beyond the block.
    beyond = ((0, 0), (0, done.slot.shape[1] - spec.span))
    computed = jnp.concatenate([done.computed, valid * jnp.int32(model.config.layers)], axis=1)
    return done._replace(
        extra={"shadow": jnp.pad(probability, beyond, constant_values=1.0)},
        computed=computed,
        executed=jnp.float32(length + spec.span),
    )
