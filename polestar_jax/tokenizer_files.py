"""Reads the tokenizer of a Hugging Face folder: `tokenizer.json`, or `vocab.json` and `merges.txt` as Dream has it.

No code of the folder is run: what Dream's own tokenizer class does is Qwen2's, and written out here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE

from polestar_jax.tokenizer import Tokenizer
from polestar_jax.types import ModelConfig

_SINGLE, _VOCABULARY, _MERGES, _CONFIG = "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_QWEN2_CLASSES = ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a folder, or None where it has no file of one.

    Args:
      folder: may also hold `tokenizer_config.json` (special tokens, chat template) and `chat_template.jinja`, which
        wins over the template in the former.
      config: of the model, whose [MASK] and EOS ids the tokenizer must agree with.

    Raises:
      ValueError: a file is damaged or missing beside another, or the tokenizer is that of another model.
    """
    from convert.shards import read_json  # not when this file is imported: polestar_jax stands alone until a load

    fields = read_json(folder / _CONFIG) if (folder / _CONFIG).is_file() else {}
    core = _read_core(folder, fields)
    if core is None:
        return None
    names = {name: _string(fields[name]) for name in _NAMES if fields.get(name) is not None}
    listed = _add_listed(core, fields.get("added_tokens_decoder") or {}, folder / _CONFIG)
    problems = _problems(core, names, listed, config)
    if problems:
        raise ValueError(
            f"the tokenizer of {folder} does not fit: {'; '.join(problems)}: use this checkpoint's own files"
        )
    vocabulary, added = core.get_vocab(), core.get_added_tokens_decoder()
    always = (config.mask_id, config.eos_id, *(vocabulary[string] for string in names.values()))
    strings = {token.content for number, token in added.items() if token.special or number in always}
    special = {string: vocabulary[string] for string in (*strings, *names.values())}
    core.add_special_tokens(list(special))  # those that were not called special are from now on
    core.encode_special_tokens = True
    bos_id = special.get(names.get("bos_token", ""))
    adds_bos = bos_id is not None and (bool(fields.get("add_bos_token")) or core.encode("").ids[:1] == [bos_id])
    return Tokenizer(core, special, names, _template(folder, fields), adds_bos)


def _read_core(folder: Path, fields: Mapping[str, Any]) -> Core | None:
    file = folder / _SINGLE
    if not file.is_file():
        return _read_qwen2(folder, fields)
    try:
        return Core.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{file} cannot be read as a tokenizer ({error}): download it again") from error


def _read_qwen2(folder: Path, fields: Mapping[str, Any]) -> Core | None:
    parts = (_VOCABULARY, _MERGES, _CONFIG)
    missing = [part for part in parts if not (folder / part).is_file()]
    if _VOCABULARY in missing and _MERGES in missing:
        return None
    if missing:
        raise ValueError(f"{folder} has a tokenizer of {', '.join(parts)}, but lacks {', '.join(missing)}: copy it")
    if fields.get("tokenizer_class") not in _QWEN2_CLASSES:
        raise ValueError(
            f"{folder / _CONFIG} says tokenizer_class={fields.get('tokenizer_class')!r}: {_VOCABULARY} and {_MERGES}"
            f" are only read for {', '.join(_QWEN2_CLASSES)}; convert others to {_SINGLE}"
        )
    try:
        core = Core(BPE.from_file(str(folder / _VOCABULARY), str(folder / _MERGES)))
    except Exception as error:  # the library raises bare Exceptions
        message = f"{_VOCABULARY} and {_MERGES} of {folder} cannot be read ({error}): download both again"
        raise ValueError(message) from error
    core.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated")
    spaced = bool(fields.get("add_prefix_space"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    core.decoder = decoders.ByteLevel()
    return core


def _add_listed(core: Core, tokens: Mapping[str, Any], file: Path) -> dict[str, int]:
    """Adds the tokens of `added_tokens_decoder` that the tokenizer lacks; returns the id that each should have."""
    try:
        ordered = sorted((int(number), dict(token)) for number, token in tokens.items())
        added = [
            AddedToken(token["content"], **{flag: bool(token.get(flag)) for flag in _FLAGS}) for _, token in ordered
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} has an added_tokens_decoder that cannot be read ({error!r}): download it again"
        ) from error
    core.add_tokens([token for token in added if core.token_to_id(token.content) is None])
    return {token.content: number for (number, _), token in zip(ordered, added, strict=True)}


def _problems(core: Core, names: Mapping[str, str], listed: Mapping[str, int], config: ModelConfig) -> list[str]:
    """A line for every id that tokenizer, its config and the model's config do not agree on."""
    vocabulary = core.get_vocab()
    largest = max(vocabulary.values(), default=0)
    problems = []
    if largest >= config.vocab_size:
        problems.append(f"its ids go up to {largest}, the model's vocabulary ends before {config.vocab_size}")
    for string, number in listed.items():
        if vocabulary[string] != number:
            problems.append(f"{_CONFIG} says that {string!r} is {number}, its vocabulary makes it {vocabulary[string]}")
    problems += [f"{name} {string!r} is no token" for name, string in names.items() if string not in vocabulary]
    mask = names.get("mask_token")
    if mask in vocabulary and vocabulary[mask] != config.mask_id:
        problems.append(f"mask_token {mask!r} is {vocabulary[mask]}, config.json says {config.mask_id}")
    added = core.get_added_tokens_decoder()
    for name, number in (("mask_token_id", config.mask_id), ("eos_token_id", config.eos_id)):
        if number not in added and core.id_to_token(number) is not None:
            problems.append(f"{name}={number} of config.json is the ordinary token {core.id_to_token(number)!r}")
    return problems


def _template(folder: Path, fields: Mapping[str, Any]) -> str | None:
    """The chat template; of several that are told apart by name, the one called "default"."""
    if (folder / _TEMPLATE).is_file():
        return (folder / _TEMPLATE).read_text(encoding="utf-8")
    found = fields.get("chat_template")
    if isinstance(found, list):
        found = {each.get("name"): each.get("template") for each in found}.get("default")
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{folder / _CONFIG} has a chat_template that is no text: download it again")
    return found


def _string(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]
