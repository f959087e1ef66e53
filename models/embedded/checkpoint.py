"""The embedded checkpoint on disk: its vocabulary as ids, and its files in the HF LLaDA format."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from models.embedded import tasks
from models.llada import LLaDAConfig, Params, read_config

BLOCK = 8
_IDS = {word: number for number, word in enumerate(tasks.VOCABULARY)}
EOS_ID, MASK_ID = _IDS[tasks.EOS], _IDS[tasks.MASK]
_LAYER_NAMES = {
    "attention_norm": "attn_norm", "query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "attn_out",
    "feed_forward_norm": "ff_norm", "gate": "ff_proj", "up": "up_proj", "down": "ff_out",
}  # fmt: skip


def config_fields(config: LLaDAConfig) -> dict[str, Any]:
    """The HF `config.json` of a checkpoint of these shapes."""
    return {
        "activation_type": "silu", "alibi": False, "architectures": ["LLaDAModelLM"], "attention_dropout": 0.0,
        "attention_layer_norm": False, "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama",
        "d_model": config.model_size, "embedding_size": config.vocab_size, "eos_token_id": config.eos_id,
        "include_bias": False, "include_qkv_bias": False, "input_emb_norm": False, "layer_norm_type": "rms",
        "layer_norm_with_affine": True, "mask_token_id": config.mask_id, "max_sequence_length": config.max_length,
        "mlp_hidden_size": config.feed_forward, "model_type": "llada", "n_heads": config.heads,
        "n_kv_heads": config.kv_heads, "n_layers": config.layers, "pad_token_id": config.eos_id,
        "rms_norm_eps": config.epsilon, "rope": True, "rope_full_precision": True, "rope_theta": config.rope_theta,
        "scale_logits": False, "torch_dtype": "float32", "vocab_size": config.vocab_size, "weight_tying": config.tied,
    }  # fmt: skip


def make_tokenizer() -> Tokenizer:
    """One token per word, split at white space."""
    tokenizer = Tokenizer(WordLevel(_IDS, unk_token=tasks.UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([tasks.EOS, tasks.MASK, tasks.UNKNOWN])
    return tokenizer


def encode(items: Sequence[tasks.Item]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids `[B, P + G]`, prompts padded on the left and answers with ends of text, and validity `[B, P + G]`."""
    tokens = np.full((len(items), tasks.PROMPT_LENGTH + tasks.ANSWER_LENGTH), EOS_ID, np.int32)
    valid = np.ones(tokens.shape, bool)
    for row, item in enumerate(items):
        prompt = [_IDS[word] for word in item.prompt.split()]
        answer = [_IDS[word] for word in item.answer.split()]
        start = tasks.PROMPT_LENGTH - len(prompt)
        valid[row, :start] = False
        tokens[row, start : tasks.PROMPT_LENGTH + len(answer)] = prompt + answer
    return tokens, valid


def decode_text(answer: np.ndarray) -> str:
    """Words of answer ids `[G]`, up to the end of text."""
    words = [tasks.VOCABULARY[token] for token in answer]
    return " ".join(words[: words.index(tasks.EOS)] if tasks.EOS in words else words)


def save_checkpoint(folder: Path, config: LLaDAConfig, params: Params) -> None:
    """Writes config, tokenizer, decoding defaults and weights under the names of HF LLaDA, each file in one rename."""
    tensors = {
        "model.transformer.wte.weight": params["embedding"],
        "model.transformer.ln_f.weight": params["norm"]["weight"],
        "model.transformer.ff_out.weight": params["head"]["weight"],
    }
    for layer, ours, theirs in _layer_names(config.layers):
        tensors[theirs] = params["layers"][layer][ours]["weight"]
    generation = {"gen_length": tasks.ANSWER_LENGTH, "block_length": BLOCK, "steps": tasks.ANSWER_LENGTH}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as path:
        save_file({name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}, path, {"format": "pt"})
    with replacing(folder / "tokenizer.json") as path:
        make_tokenizer().save(str(path))
    for name, content in (("config.json", config_fields(config)), ("generation_config.json", generation)):
        with replacing(folder / name) as path:
            path.write_text(json.dumps(content, indent=2) + "\n")


def load_checkpoint(folder: Path) -> tuple[LLaDAConfig, Params]:
    """Reads what `save_checkpoint` wrote."""
    config = read_config(json.loads((folder / "config.json").read_text()))
    tensors = {name: jnp.asarray(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    params: Params = {
        "embedding": tensors["model.transformer.wte.weight"],
        "layers": {layer: {} for layer in range(config.layers)},
        "norm": {"weight": tensors["model.transformer.ln_f.weight"]},
        "head": {"weight": tensors["model.transformer.ff_out.weight"]},
    }
    for layer, ours, theirs in _layer_names(config.layers):
        params["layers"][layer][ours] = {"weight": tensors[theirs]}
    return config, params


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, renamed to `path` at the end, so that no reader ever sees half a file."""
    aside = path.with_name(f".{path.name}.new")
    yield aside
    os.replace(aside, path)


def _layer_names(layers: int) -> Iterator[tuple[int, str, str]]:
    for layer in range(layers):
        for ours, theirs in _LAYER_NAMES.items():
            yield layer, ours, f"model.transformer.blocks.{layer}.{theirs}.weight"
