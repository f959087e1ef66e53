"""The embedded checkpoints on disk: their vocabulary as ids, and their files in the Hugging Face format."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from convert.names import flatten
from convert.source import family_of
from models.embedded import tasks
from models.transformer import Config, Params

BLOCK = 8
_IDS = {word: number for number, word in enumerate(tasks.VOCABULARY)}
EOS_ID, MASK_ID = _IDS[tasks.EOS], _IDS[tasks.MASK]


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


def save_checkpoint(folder: Path, config: Config, params: Params) -> None:
    """Writes config, tokenizer, decoding defaults and weights as its family has them, each file in one rename."""
    family, (naming, *_) = family_of(config)
    tensors = {naming.source(path): np.asarray(leaf, np.float32) for path, leaf in flatten(params).items()}
    generation = {"gen_length": tasks.ANSWER_LENGTH, "block_length": BLOCK, "steps": tasks.ANSWER_LENGTH}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as path:
        save_file(tensors, path, {"format": "pt"})
    with replacing(folder / "tokenizer.json") as path:
        make_tokenizer().save(str(path))
    for name, content in (("config.json", family.write_config(config)), ("generation_config.json", generation)):
        with replacing(folder / name) as path:
            path.write_text(json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, renamed to `path` at the end, so that no reader ever sees half a file."""
    aside = path.with_name(f".{path.name}.new")
    yield aside
    os.replace(aside, path)
