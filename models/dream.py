"""Dream (Dream-7B, Dream-Coder, DiffuCoder): Qwen2-like, grouped queries, biases on queries, keys and values.

Its logits predict the *next* position (`Config.shift` is 1). Reads and writes its `config.json`.
"""

from collections.abc import Mapping
from typing import Any

from models.fields import Fields, head_problems
from models.transformer import Config

_FIELDS = Fields(
    title="Dream",
    used={
        "vocab_size": "vocab_size",
        "hidden_size": "model_size",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "feed_forward",
        "max_position_embeddings": "max_length",
        "rope_theta": "rope_theta",
        "rms_norm_eps": "epsilon",
        "mask_token_id": "mask_id",
        "eos_token_id": "eos_id",
    },
    optional=("num_key_value_heads",),
    fixed={
        "model_type": ("Dream",),
        "hidden_act": ("silu",),
        "rope_scaling": (None,),
        "use_sliding_window": (False, None),
        "use_mrope": (False, None),
        "attention_bias": (True, None),
        "mlp_bias": (False, None),
        "layer_types": (None,),
    },
    ignored=frozenset(
        "_attn_implementation_autoset _name_or_path architectures attention_dropout attn_implementation auto_map"
        " bos_token_id dtype initializer_range max_window_layers pad_token_id rope_parameters sliding_window"
        " tie_word_embeddings torch_dtype transformers_version use_cache".split()
    ),
)


TRAITS: dict[str, Any] = {"family": "dream", "bias": True, "shift": 1, "wide_rotary": False}
"""What every Dream's `Config` says beside shapes and ids."""


def read_config(fields: Mapping[str, Any], dtype: str = "float32") -> Config:
    """Reads the fields of a HF `config.json`; every field is used, ignored by name, or refused.

    Old files have `rope_theta` and `rope_scaling`, files of transformers 5 have both inside `rope_parameters`.

    Raises:
      ValueError: listing every field that is missing, unknown, or has a value that this implementation lacks.
    """
    fields, rotary = _with_rotary_fields(fields)
    problems = rotary + _FIELDS.problems(fields, dtype)
    kv_heads = fields.get("num_key_value_heads")
    problems = problems or head_problems(fields, "hidden_size", "num_attention_heads", "num_key_value_heads", kv_heads)
    _FIELDS.check(problems)
    return Config(
        **{ours: fields[theirs] for theirs, ours in _FIELDS.used.items()} | TRAITS,
        kv_heads=kv_heads or fields["num_attention_heads"],
        tied=bool(fields.get("tie_word_embeddings")),
        dtype=dtype,
    )


def _with_rotary_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields with `rope_theta` where the old layout has it, and a line for what the new layout says beyond it."""
    inner = fields.get("rope_parameters")
    if inner is None:
        return dict(fields), []
    if not isinstance(inner, Mapping):
        return dict(fields), [f"rope_parameters={inner!r} must be an object"]
    theta, outer = inner.get("rope_theta"), fields.get("rope_theta")
    problems = [
        f"rope_parameters.{name}={value!r} is not supported"
        for name, value in inner.items()
        if name != "rope_theta" and (name, value) != ("rope_type", "default")
    ]
    if theta is not None and outer is not None and theta != outer:
        problems.append(f"rope_theta={outer!r} and rope_parameters.rope_theta={theta!r} differ")
    return {**fields, "rope_theta": outer if theta is None else theta}, problems


def write_config(config: Config) -> dict[str, Any]:
    """The HF `config.json` of a checkpoint of these shapes: what `read_config` reads."""
    return {
        "architectures": ["DreamModel"], "attention_dropout": 0.0, "bos_token_id": config.eos_id,
        "eos_token_id": config.eos_id, "hidden_act": "silu", "hidden_size": config.model_size,
        "intermediate_size": config.feed_forward, "mask_token_id": config.mask_id,
        "max_position_embeddings": config.max_length, "model_type": "Dream", "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers, "num_key_value_heads": config.kv_heads, "pad_token_id": config.eos_id,
        "rms_norm_eps": config.epsilon, "rope_scaling": None, "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied, "torch_dtype": config.dtype, "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }  # fmt: skip
