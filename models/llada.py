"""LLaDA (LLaDA-8B, LLaDA-1.5): Llama-like, no biases, logits of a row's own position. Reads its `config.json`."""

from collections.abc import Mapping
from typing import Any

from models.fields import Fields, head_problems
from models.transformer import Config

_FIELDS = Fields(
    title="LLaDA",
    used={
        "vocab_size": "vocab_size",
        "d_model": "model_size",
        "n_layers": "layers",
        "n_heads": "heads",
        "mlp_hidden_size": "feed_forward",
        "max_sequence_length": "max_length",
        "rope_theta": "rope_theta",
        "rms_norm_eps": "epsilon",
        "mask_token_id": "mask_id",
        "eos_token_id": "eos_id",
    },
    optional=("embedding_size", "n_kv_heads"),
    fixed={
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
    },
    ignored=frozenset(
        "_attn_implementation_autoset _name_or_path alibi_bias_max architectures attention_dropout auto_map"
        " attention_layer_norm_with_affine bos_token_id dtype embedding_dropout flash_attention init_cutoff_factor"
        " init_device init_fn init_std mlp_ratio pad_token_id precision residual_dropout torch_dtype"
        " train_max_sequence_length transformers_version use_cache weight_tying".split()
    ),
)


def read_config(fields: Mapping[str, Any], dtype: str = "float32") -> Config:
    """Reads the fields of a HF `config.json`; every field is used, ignored by name, or refused.

    Raises:
      ValueError: listing every field that is missing, unknown, or has a value that this implementation lacks.
    """
    problems = _FIELDS.problems(fields, dtype)
    problems = problems or head_problems(fields, "d_model", "n_heads", "n_kv_heads", fields.get("n_kv_heads"))
    _FIELDS.check(problems)
    numbers = {ours: fields[theirs] for theirs, ours in _FIELDS.used.items()}
    return Config(
        **numbers | {"vocab_size": fields.get("embedding_size") or fields["vocab_size"]},
        family="llada",
        kv_heads=fields.get("n_kv_heads") or fields["n_heads"],
        tied=bool(fields.get("weight_tying")),
        dtype=dtype,
    )


def write_config(config: Config) -> dict[str, Any]:
    """The HF `config.json` of a checkpoint of these shapes: what `read_config` reads."""
    return {
        "activation_type": "silu", "alibi": False, "architectures": ["LLaDAModelLM"], "attention_dropout": 0.0,
        "attention_layer_norm": False, "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama",
        "d_model": config.model_size, "embedding_size": config.vocab_size, "eos_token_id": config.eos_id,
        "include_bias": False, "include_qkv_bias": False, "input_emb_norm": False, "layer_norm_type": "rms",
        "layer_norm_with_affine": True, "mask_token_id": config.mask_id, "max_sequence_length": config.max_length,
        "mlp_hidden_size": config.feed_forward, "model_type": "llada", "n_heads": config.heads,
        "n_kv_heads": config.kv_heads, "n_layers": config.layers, "pad_token_id": config.eos_id,
        "rms_norm_eps": config.epsilon, "rope": True, "rope_full_precision": True, "rope_theta": config.rope_theta,
        "scale_logits": False, "torch_dtype": config.dtype, "vocab_size": config.vocab_size,
        "weight_tying": config.tied,
    }  # fmt: skip
