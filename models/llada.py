"""LLaDA (LLaDA-8B, LLaDA-1.5): a Llama-like bidirectional mask predictor, as Flax NNX modules and pure functions."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers import Block, Linear, RMSNorm, rotate

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LLaDAConfig:
    """Shapes and ids of a LLaDA checkpoint.

    Attributes:
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
      dtype: of the weights and of the residual stream, "float32" or "bfloat16".
    """

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
    dtype: str = "float32"


class Network(nnx.Module):
    """The parameters of LLaDA, one module per layer."""

    def __init__(self, config: LLaDAConfig, rngs: nnx.Rngs):
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
                    bias=False,
                    dtype=dtype,
                    rngs=rngs,
                )
                for _ in range(config.layers)
            ]
        )
        self.norm = RMSNorm(config.model_size, epsilon=config.epsilon, dtype=dtype)
        self.head = None if config.tied else Linear(config.model_size, config.vocab_size, dtype=dtype, rngs=rngs)


@functools.lru_cache(maxsize=16)
def _graph(config: LLaDAConfig) -> tuple[nnx.GraphDef, Any]:
    """The static half of `Network` and the shapes of its parameters, made without allocating any."""
    return nnx.split(nnx.eval_shape(lambda: Network(config, nnx.Rngs(0))))


@dataclasses.dataclass(frozen=True)
class LLaDA:
    """What the decoding library needs of LLaDA: static sizes and pure functions over `params` (design.md section 7).

    `params` is a nested dict with one subtree per layer: `{"embedding", "layers": {0: ...}, "norm", "head"}`.
    """

    config: LLaDAConfig
    shift: int = dataclasses.field(default=0, init=False)

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
        """Rotary position, in float32, on `[..., R, H, A]` at `positions` `[..., R]`; negative positions undo it."""
        return rotate(x, positions, self.config.rope_theta)

    def project(self, params: Params, layer: int, hidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Un-rotated queries `[..., R, H, A]`, keys, values `[..., R, Hkv, A]` of layer inputs `[..., R, D]`."""
        return self._network(params).layers[layer].project(hidden)

    def finish(self, params: Params, layer: int, hidden: jax.Array, attended: jax.Array) -> jax.Array:
        """One layer's outputs `[..., R, D]` from its inputs and attended values `[..., R, H, A]`."""
        return self._network(params).layers[layer].finish(hidden, attended)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Logits `[..., V]` in the model's dtype from last-layer outputs `[..., D]`."""
        network = self._network(params)
        hidden = network.norm(hidden)
        if network.head is None:
            return jax.lax.dot_general(hidden, params["embedding"], (((hidden.ndim - 1,), (1,)), ((), ())))
        return network.head(hidden)

    def __call__(self, params: Params, tokens: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """Logits `[B, N, V]` of whole sequences: training and parity with the original, not decoding.

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


_REQUIRED = {
    "d_model": "model_size",
    "n_layers": "layers",
    "n_heads": "heads",
    "mlp_hidden_size": "feed_forward",
    "max_sequence_length": "max_length",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "epsilon",
    "mask_token_id": "mask_id",
    "eos_token_id": "eos_id",
}
_COUNTS = ("vocab_size", "embedding_size", "n_kv_heads")
# What this implementation assumes; any other value would change the mathematics.
_FIXED = {
    "model_type": ("llada",),
    "activation_type": ("silu",),
    "block_type": ("llama",),
    "block_group_size": (1,),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "bias_for_layer_norm": (False,),
    "rope": (True,),
    "rope_full_precision": (True,),
    "alibi": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False, None),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "multi_query_attention": (False, None),
    "clip_qkv": (None,),
}
_IGNORED = frozenset(
    "_attn_implementation_autoset _name_or_path alibi_bias_max architectures attention_dropout auto_map"
    " attention_layer_norm_with_affine bos_token_id dtype embedding_dropout embedding_size flash_attention"
    " init_cutoff_factor init_device init_fn init_std mlp_ratio n_kv_heads pad_token_id precision residual_dropout"
    " torch_dtype"
    " train_max_sequence_length transformers_version use_cache vocab_size weight_tying".split()
)


def read_config(fields: Mapping[str, Any], dtype: str = "float32") -> LLaDAConfig:
    """Reads the fields of a HF `config.json`; every field is used, ignored by name, or refused.

    Raises:
      ValueError: listing every field that is missing, unknown, or has a value that this implementation lacks.
    """
    problems = [f"{name} is missing" for name in (*_REQUIRED, "vocab_size") if fields.get(name) is None]
    for name in (*_REQUIRED, *_COUNTS):
        value, kind = fields.get(name), float if name in ("rope_theta", "rms_norm_eps") else int
        number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if value is not None and not (number and (value > 0 or (value == 0 and name.endswith("_id")))):
            problems.append(f"{name}={value!r} must be a positive {'number' if kind is float else 'integer'}")
    for name, value in fields.items():
        if name in _FIXED:
            if value not in _FIXED[name]:
                problems.append(f"{name}={value!r} is not supported (only {_FIXED[name][0]!r})")
        elif name not in _REQUIRED and name not in _IGNORED:
            problems.append(f"{name}={value!r} is not a known field of a LLaDA config")
    if dtype not in ("float32", "bfloat16"):
        problems.append(f"dtype={dtype!r} must be 'float32' or 'bfloat16'")
    heads = fields.get("n_heads", 0)
    kv_heads = fields.get("n_kv_heads") or heads
    if not problems and (fields["d_model"] % (2 * heads) or heads % kv_heads):
        problems.append(
            f"n_heads={heads} must split d_model={fields['d_model']} into even heads, and n_kv_heads={kv_heads}"
        )
    if problems:
        raise ValueError("config.json cannot be read as LLaDA: " + "; ".join(problems))
    return LLaDAConfig(
        **{ours: fields[theirs] for theirs, ours in _REQUIRED.items()},
        vocab_size=fields.get("embedding_size") or fields["vocab_size"],
        kv_heads=kv_heads,
        tied=bool(fields.get("weight_tying")),
        dtype=dtype,
    )
