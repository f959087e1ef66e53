"""Conversion from Hugging Face folders: what loads equals the file, what does not fit is refused with all offenders."""

import json
import re
import shutil
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from convert import load_hf
from convert.names import LLADA, LLAMA, flatten
from models import dream, llada
from models.published import DREAM_7B, LLADA_8B

EMBEDDING, HEAD = "model.transformer.wte.weight", "model.transformer.ff_out.weight"
QUERY, GATE = "model.transformer.blocks.1.q_proj.weight", "model.transformer.blocks.0.ff_proj.weight"


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    """A copy of a small checkpoint, to damage."""
    target = tmp_path / "checkpoint"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / "llada_gqa" / name, target / name)
    return target


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def write_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")


def shard(folder: Path, parts: int = 3) -> dict[str, str]:
    """Cuts the single file into shards with an index; returns the index's weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{1 + i % parts:05}-of-{parts:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    write_index(folder, places)
    return places


def write_index(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def rewrite_header(file: Path, change) -> None:
    """Applies `change` to the header of a safetensors file and keeps its data."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])


def refusal(folder: Path, error: type[Exception] = ValueError, **options) -> str:
    """The message with which loading is refused."""
    with pytest.raises(error) as caught:
        load_hf(folder, **options)
    return str(caught.value)


def assert_same(actual, expected) -> None:
    actual, expected = flatten(actual), flatten(expected)
    assert actual.keys() == expected.keys()
    for path, leaf in expected.items():
        assert actual[path].dtype == leaf.dtype
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)


# What loads.


@pytest.mark.parametrize("name", ["llada_mha", "llada_gqa"])
def test_every_tensor_of_the_file_is_in_its_place(golden: Path, name: str):
    model, params = load_hf(golden / name)
    expected = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model.abstract_params())
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == expected
    file = load_file(golden / name / "model.safetensors")
    leaves = flatten(params)
    assert {LLADA.source(path) for path in leaves} == file.keys()
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, file[LLADA.source(path)], err_msg=path)


def test_shards_load_as_the_single_file(folder: Path):
    _, single = load_hf(folder)
    shard(folder)
    assert_same(load_hf(folder)[1], single)


def test_llama_like_names_load_as_the_original_ones(folder: Path):
    _, original = load_hf(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {LLAMA.source(path): tensors[LLADA.source(path)] for path in flatten(original)}
    assert {"model.layers.2.self_attn.o_proj.weight", "model.embed_tokens.weight", "lm_head.weight"} < renamed.keys()
    write_tensors(folder, renamed)
    assert_same(load_hf(folder)[1], original)


def test_buffers_are_ignored_by_name(folder: Path):
    _, expected = load_hf(folder)
    tensors = load_file(folder / "model.safetensors")
    write_tensors(folder, tensors | {"model.transformer.blocks.0.rotary_emb.inv_freq": np.ones(8, np.float32)})
    assert_same(load_hf(folder)[1], expected)


def test_dtype_is_kept_or_converted(folder: Path):
    model, wide = load_hf(folder)
    assert model.config.dtype == "float32"
    narrow_model, narrow = load_hf(folder, dtype="bfloat16")
    assert narrow_model.config.dtype == "bfloat16"
    assert_same(narrow, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide))
    tensors = load_file(folder / "model.safetensors")
    write_tensors(folder, {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()})
    kept_model, kept = load_hf(folder)
    assert kept_model.config.dtype == "bfloat16"
    assert_same(kept, narrow)
    assert_same(load_hf(folder, dtype=jnp.float32)[1], jax.tree.map(lambda leaf: leaf.astype(jnp.float32), kept))


def test_float16_loads_when_a_dtype_is_asked_for(folder: Path):
    tensors = {name: tensor.astype(np.float16) for name, tensor in load_file(folder / "model.safetensors").items()}
    write_tensors(folder, tensors)
    _, params = load_hf(folder, dtype="float32")
    np.testing.assert_array_equal(params["embedding"], tensors[EMBEDDING].astype(np.float32))
    message = refusal(folder)
    assert "F16" in message and "pass dtype=" in message and message.count("dtype: ") == len(tensors)


def test_tied_head(folder: Path):
    edit_config(folder, weight_tying=True)
    message = refusal(folder)
    assert HEAD in message and EMBEDDING in message and "weight_tying" in message
    tensors = load_file(folder / "model.safetensors")
    write_tensors(folder, tensors | {HEAD: tensors[EMBEDDING]})
    model, with_copy = load_hf(folder)
    assert model.config.tied and "head" not in with_copy
    del tensors[HEAD]
    write_tensors(folder, tensors)
    assert_same(load_hf(folder)[1], with_copy)


# Files that are missing or damaged.


def test_missing_folder_and_missing_files(tmp_path: Path, folder: Path):
    assert "nowhere is not a folder" in refusal(tmp_path / "nowhere", FileNotFoundError)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder, FileNotFoundError)
    assert "model.safetensors.index.json" in message and "pytorch_model.bin" in message
    (folder / "config.json").unlink()
    assert "config.json is missing" in refusal(folder, FileNotFoundError)


def test_missing_shards_are_all_named(folder: Path):
    first, second, _ = sorted(set(shard(folder).values()))
    (folder / first).unlink()
    (folder / second).unlink()
    message = refusal(folder, FileNotFoundError)
    assert first in message and second in message and "download" in message


def test_missing_and_truncated_shards_are_named_together(folder: Path):
    first, second, third = sorted(set(shard(folder).values()))
    (folder / first).unlink()
    (folder / second).write_bytes((folder / second).read_bytes()[:-1])
    message = refusal(folder)
    assert first in message and second in message and third not in message


def test_index_and_shards_disagree(folder: Path):
    places = shard(folder)
    del places[QUERY]
    stray = next(file for file in places.values() if file != places[GATE])
    actual, places[GATE] = places[GATE], stray
    places["model.transformer.extra"] = stray
    write_index(folder, places)
    message = refusal(folder)
    assert re.search(f"index: {QUERY} is in .* does not list it", message)
    assert f"index: {GATE} is in {actual}, but model.safetensors.index.json puts it in {stray}" in message
    assert f"index: model.transformer.extra is not in {stray}" in message


def test_a_tensor_in_two_shards(folder: Path):
    places = shard(folder)
    other = next(file for file in places.values() if file != places[QUERY])
    tensors = load_file(folder / other)
    save_file(tensors | {QUERY: np.zeros((64, 64), np.float32)}, folder / other)
    assert f"twice: {QUERY}" in refusal(folder)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}', "{"]
)
def test_broken_index(folder: Path, content: str):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(content)
    assert re.search(r"index\.json .*download it again", refusal(folder))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.00001, 0.002, 0.01, 0.5, 0.99999])
def test_truncated_file(folder: Path, sharded: bool, share: float):
    name = shard(folder)[QUERY] if sharded else "model.safetensors"
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * share)])
    message = refusal(folder)
    assert str(folder / name) in message and "truncated or corrupt" in message and "download" in message


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_flipped_header_bits(golden: Path, tmp_path_factory, data):
    source = golden / "llada_gqa"
    content = bytearray((source / "model.safetensors").read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    place, bit = data.draw(st.integers(0, 8 + length - 1)), data.draw(st.integers(0, 7))
    content[place] ^= 1 << bit
    folder = tmp_path_factory.mktemp("flipped")
    shutil.copy(source / "config.json", folder)
    (folder / "model.safetensors").write_bytes(content)
    try:
        _, params = load_hf(folder)
    except ValueError as error:
        assert str(folder) in str(error)
    else:  # the bit did not matter: the free metadata, or padding
        assert_same(params, load_hf(source)[1])


def test_trailing_bytes(folder: Path):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    assert "truncated or corrupt" in refusal(folder)


# Tensors that do not fit.


def test_missing_extra_and_misshapen_tensors_are_listed_at_once(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    del tensors[QUERY], tensors["model.transformer.ln_f.weight"]
    tensors["model.transformer.blocks.0.q_norm.weight"] = np.ones(16, np.float32)
    tensors["model.transformer.blocks.3.attn_norm.weight"] = np.ones(64, np.float32)
    tensors[GATE] = np.zeros((64, 160), np.float32)
    tensors["model.transformer.blocks.2.up_proj.weight"] = np.zeros(160, np.float32)
    write_tensors(folder, tensors)
    lines = refusal(folder).splitlines()[1:]
    assert sorted(line.strip() for line in lines) == sorted(
        [
            f"missing: {QUERY} [64, 64]",
            "missing: model.transformer.ln_f.weight [64]",
            "unexpected: model.transformer.blocks.0.q_norm.weight [16] is no tensor of a LLaDA checkpoint",
            "unexpected: model.transformer.blocks.3.attn_norm.weight [64] is no tensor of a LLaDA checkpoint",
            f"shape: {GATE} is [64, 160], config.json makes it [160, 64]",
            "shape: model.transformer.blocks.2.up_proj.weight is [160], config.json makes it [160, 64]",
        ]
    )


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "I8", "U8"])
def test_quantized_tensors(folder: Path, kind: str):
    tensors = load_file(folder / "model.safetensors")
    narrow = [QUERY, GATE]
    write_tensors(folder, tensors | {name: np.zeros(tensors[name].shape, np.int8) for name in narrow})

    def relabel(header):
        for name in narrow:
            header[name]["dtype"] = kind

    rewrite_header(folder / "model.safetensors", relabel)
    for dtype in (None, "bfloat16"):
        message = refusal(folder, dtype=dtype)
        assert all(f"dtype: {name} is {kind}" in message for name in narrow) and "original" in message
        assert len(message.splitlines()) == 1 + len(narrow)


def test_mixed_dtypes_need_a_choice(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    write_tensors(folder, tensors | {QUERY: tensors[QUERY].astype(ml_dtypes.bfloat16)})
    message = refusal(folder)
    assert f"dtype: {QUERY} is BF16: pass dtype=" in message and len(message.splitlines()) == 2
    assert load_hf(folder, dtype="float32")[1]["layers"][1]["query"]["weight"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float16", "int8", jnp.float16, "nonsense"])
def test_unsupported_target_dtype(folder: Path, dtype):
    assert re.search(r"dtype='\w+' must be 'float32' or 'bfloat16'", refusal(folder, dtype=dtype))


def test_vocabulary_of_weights_and_config_differ(folder: Path):
    edit_config(folder, vocab_size=320, embedding_size=320)
    lines = refusal(folder).splitlines()[1:]
    assert len(lines) == 2
    for line, name in zip(sorted(lines), (HEAD, EMBEDDING), strict=True):
        assert f"vocabulary: {name} has 300 rows, config.json says 320" in line


# Configs that do not fit.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask_token_id": 300, "eos_token_id": 305}, ["mask_token_id=300", "eos_token_id=305", "vocabulary of 300"]),
        ({"eos_token_id": -1, "d_model": "64", "n_heads": 0}, ["eos_token_id=-1", "d_model='64'", "n_heads=0"]),
        ({"embedding_size": 256, "mask_token_id": 9, "eos_token_id": 8}, ["embedding_size=256", "vocab_size=300"]),
        ({"model_type": "qwen2"}, ["model_type='qwen2'", "'llada'", "'Dream'"]),
        ({"model_type": ...}, ["model_type=None", "'llada'"]),
        ({"rope_theta": ...}, ["rope_theta is missing"]),
        ({"rope_theta": ..., "d_model": ...}, ["rope_theta is missing", "d_model is missing"]),
        ({"sliding_window": 128}, ["sliding_window=128", "not a known field"]),
        ({"include_bias": True, "alibi": True}, ["include_bias=True", "alibi=True"]),
        ({"n_kv_heads": 3}, ["n_kv_heads=3"]),
    ],
)
def test_config_that_cannot_be_read(folder: Path, change: dict, words: list[str]):
    edit_config(folder, **change)
    message = refusal(folder)
    assert str(folder / "config.json") in message
    assert all(word in message for word in words)


PUBLISHED = {
    LLADA_8B: (
        llada,
        {
            "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
            "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
            "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"}, "bias_for_layer_norm": False,
            "block_group_size": 1, "block_type": "llama", "d_model": 4096, "embedding_dropout": 0.0,
            "embedding_size": 126464, "eos_token_id": 126081, "flash_attention": False, "include_bias": False,
            "include_qkv_bias": False, "init_cutoff_factor": None, "init_device": "meta", "init_fn": "mitchell",
            "init_std": 0.02, "input_emb_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True,
            "mask_token_id": 126336, "max_sequence_length": 4096, "mlp_hidden_size": 12288, "mlp_ratio": 4,
            "model_type": "llada", "multi_query_attention": None, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32,
            "pad_token_id": 126081, "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-05,
            "rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False,
            "transformers_version": "4.46.3", "use_cache": False, "vocab_size": 126464, "weight_tying": False,
        },
    ),
    DREAM_7B: (
        dream,
        {
            "_name_or_path": "Dream-org/Dream-v0-Instruct-7B", "architectures": ["DreamModel"],
            "attention_dropout": 0.0, "attn_implementation": "flash_attention_2",
            "auto_map": {"AutoConfig": "configuration_dream.DreamConfig"}, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
            "intermediate_size": 18944, "mask_token_id": 151666, "max_position_embeddings": 131072,
            "max_window_layers": 28, "model_type": "Dream", "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "pad_token_id": 151643, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.46.2", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
            "vocab_size": 152064,
        },
    ),
}  # fmt: skip
"""What public copies of the published folders say, beside the config that it must be read as."""


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config.family)
def test_published_configs(config):
    family, fields = PUBLISHED[config]
    assert family.read_config(fields, "bfloat16") == config


def test_config_of_another_family(folder: Path):
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3}))
    assert "model_type='qwen2'" in refusal(folder)


@pytest.mark.parametrize("content", ["", "[1]", '{"d_model": 64', "\x00"])
def test_config_that_is_no_json_object(folder: Path, content: str):
    (folder / "config.json").write_text(content)
    message = refusal(folder)
    assert str(folder / "config.json") in message and "download it again" in message


def test_nothing_is_read_before_everything_is_checked(folder: Path, monkeypatch):
    monkeypatch.setattr("convert.hf.read", lambda entries: pytest.fail("weights were read"))
    edit_config(folder, d_model=128)
    assert refusal(folder).count("shape: ") > 20
