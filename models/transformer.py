"""The bidirectional mask predictor that LLaDA and Dream are, as Flax NNX modules and pure functions.

The families differ in what a `Config` says: biases, grouped queries, the dtype of the rotary arithmetic, and whether a
row's logits predict its own position or the next one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers import Block, Linear, RMSNorm, rotate

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Shapes, ids and family of a checkpoint.

    Attributes:
      family: "llada" or "dream", the `model_type` of the Hugging Face config in lower case.
      vocab_size: rows of the embedding and of the head, padding included.
      model_size: D.
      layers: L.
      heads: H.
      kv_heads: Hkv; H when the model has no grouped queries.
      feed_forward: inner size of the gated feed-forward part.
      max_length: longest trained context, prompt and generation together.
      rope_theta: base of the rotary frequencies.
      epsilon: of every RMS norm.
      mask_id: the [MASK] token.
      eos_id: the end-of-text token, which the paper's counts leave out.
      tied: whether the head is the embedding.
      bias: whether the projections to queries, keys and values have biases.
      shift: distance from a row to the position that its logits predict: 0 for LLaDA, 1 for Dream.
      wide_rotary: rotary arithmetic in float32 (LLaDA); else in `dtype`, cos and sin rounded to it (Dream).
      dtype: of the weights and of the residual stream, "float32" or "bfloat16".
    """

    family: str
    vocab_size: int
    model_size: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    max_length: int
    rope_theta: float
    epsilon: float
    mask_id: int
    eos_id: int
    tied: bool = False
    bias: bool = False
    shift: int = 0
    wide_rotary: bool = True
    dtype: str = "float32"


class Network(nnx.Module):
    """The parameters, one module per layer."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.model_size), dtype)
        self.embedding = nnx.Param(0.02 * table)
        self.layers = nnx.List(
            [
                Block(
                    model_size=config.model_size,
                    heads=config.heads,
                    kv_heads=config.kv_heads,
                    feed_forward=config.feed_forward,
                    epsilon=config.epsilon,
                    bias=config.bias,
                    dtype=dtype,
                    rngs=rngs,
                )
                for _ in range(config.layers)
            ]
        )
        self.norm = RMSNorm(config.model_size, epsilon=config.epsilon, dtype=dtype)
        self.head = None if config.tied else Linear(config.model_size, config.vocab_size, dtype=dtype, rngs=rngs)


@functools.lru_cache(maxsize=16)
def _graph(config: Config) -> tuple[nnx.GraphDef, Any]:
    """The static half of `Network` and the shapes of its parameters, made without allocating any."""
    return nnx.split(nnx.eval_shape(lambda: Network(config, nnx.Rngs(0))))


@dataclasses.dataclass(frozen=True)
class Transformer:
    """What the decoding library needs of a model: static sizes and pure functions over `params` (design.md section 7).

    `params` is a nested dict with one subtree per layer: `{"embedding", "layers": {0: ...}, "norm", "head"}`.
    """

    config: Config

    @property
    def shift(self) -> int:
        """Distance from a row to the position that its logits predict."""
        return self.config.shift

    def init(self, key: jax.Array) -> Params:
        """Random parameters, for training and for tests."""
        return nnx.to_pure_dict(nnx.state(Network(self.config, nnx.Rngs(key))))

    def abstract_params(self) -> Params:
        """The tree of `jax.ShapeDtypeStruct` that `init`, training and conversion agree on."""
        return nnx.to_pure_dict(_graph(self.config)[1])

    def _network(self, params: Params) -> Network:
        return nnx.merge(_graph(self.config)[0], params)

    def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Layer-0 inputs `[..., D]` of token ids `[...]`."""
        return jnp.take(params["embedding"], tokens, axis=0, mode="clip")

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotary position on `[..., R, H, A]` at `positions` `[..., R]`; negative positions undo it."""
        dtype = jnp.float32 if self.config.wide_rotary else x.dtype
        return rotate(x, positions, self.config.rope_theta, dtype)

    def project(self, params: Params, layer: int, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Un-rotated queries `[..., R, H, A]`, keys, values `[..., R, Hkv, A]` of layer inputs `[..., R, D]`."""
        return self._network(params).layers[layer].project(hidden)

    def normalize(self, params: Params, layer: int, hidden: jax.Array) -> jax.Array:
        """What `project` sees of layer inputs `[..., R, D]`."""
        return self._network(params).layers[layer].normalize(hidden)

    def attention_output(self, params: Params, layer: int, attended: jax.Array) -> jax.Array:
        """What attention adds to the residual stream, `[..., R, D]`, from attended values `[..., R, H, A]`."""
        return self._network(params).layers[layer].attention_output(attended)

    def feed_forward(self, params: Params, layer: int, hidden: jax.Array) -> jax.Array:
        """What the feed-forward part adds to a residual stream `[..., R, D]` that has the attention output."""
        return self._network(params).layers[layer].feed_forward(hidden)

    def finish(self, params: Params, layer: int, hidden: jax.Array, attended: jax.Array) -> jax.Array:
        """One layer's outputs `[..., R, D]` from its inputs and attended values: the two residual steps in one."""
        return self._network(params).layers[layer].finish(hidden, attended)

    def head(self, params: Params) -> tuple[jax.Array, jax.Array, float]:
        """What `logits` are made by, for what finds words without them: the final norm's weight `[D]`, the head
        `[V, D]`, and the norm's epsilon."""
        weight = params["embedding"] if self.config.tied else params["head"]["weight"]
        return params["norm"]["weight"], weight, self.config.epsilon

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Logits `[..., V]` in the model's dtype from last-layer outputs `[..., D]`, not moved by `shift`."""
        network = self._network(params)
        hidden = network.norm(hidden)
        if network.head is None:
            return jax.lax.dot_general(hidden, params["embedding"], (((hidden.ndim - 1,), (1,)), ((), ())))
        return network.head(hidden)

    def __call__(self, params: Params, tokens: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """Logits `[B, N, V]` of whole sequences, not moved by `shift`: for training and parity, not decoding.

        Args:
          params: see the class.
          tokens: int32 `[B, N]`.
          valid: bool `[B, N]`, false at padding, which nobody attends to; positions count valid tokens only.
        """
        valid = jnp.ones(tokens.shape, bool) if valid is None else valid
        positions = jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1
        hidden = self.embed(params, tokens)
        for layer in range(self.config.layers):
            query, key, value = self.project(params, layer, hidden)
            query, key = self.rotate(query, positions), self.rotate(key, positions)
            attended = jax.nn.dot_product_attention(query, key, value, mask=valid[:, None, None, :])
            hidden = self.finish(params, layer, hidden, attended)
        return self.logits(params, hidden)
