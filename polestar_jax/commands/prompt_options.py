"""The options that give a prompt: text, a chat or token ids."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console


def add_prompt(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument(
        "--messages", metavar="FILE", help='a chat as JSON: [{"role": "user", "content": "..."}, ...]; - reads stdin'
    )
    prompt.add_argument("--prompt-ids", metavar="5,17,...", help="the prompt as token ids")
    parser.add_argument("--chat", action="store_true", help="make --prompt a user turn of the chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system turn of a chat (default: the template's own)")
    parser.add_argument(
        "--bos",
        action="store_true",
        help="begin with the tokenizer's BOS, once (default: as the template or the tokenizer does)",
    )


def check_prompt(arguments: argparse.Namespace) -> Any:
    """What the options say before a tokenizer is there: ids, text or the turns of a chat."""
    if arguments.prompt_ids is not None:
        for option in ("chat", "system", "bos"):
            if getattr(arguments, option):
                raise ValueError(f"--{option} needs text: give --prompt or --messages, --prompt-ids are complete")
        return _parse_ids(arguments.prompt_ids)
    if arguments.messages is None:
        return arguments.prompt
    file = "/dev/stdin" if arguments.messages == "-" else arguments.messages
    try:
        turns = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--messages {arguments.messages} cannot be read: {error}") from error
    if not isinstance(turns, list):
        raise ValueError(f"--messages {arguments.messages} holds a JSON {type(turns).__name__}, not a list of turns")
    return turns


def encode_prompt(
    prompt: Any, arguments: argparse.Namespace, tokenizer: Any, vocab_size: int, notes: Console
) -> list[int]:
    """The ids of what `check_prompt` found; says which words the tokenizer does not know."""
    if arguments.prompt_ids is not None:
        ids = prompt
    elif tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer to read text with; give the ids with --prompt-ids")
    else:
        ids = tokenizer.encode(prompt, chat=arguments.chat, system=arguments.system, bos=arguments.bos or None)
        unknown = tokenizer.unknown_words(prompt) if isinstance(prompt, str) else []
        if unknown:
            notes.print(
                f"polestar: warning: the tokenizer of {arguments.model} does not know: {', '.join(unknown)}",
                markup=False,
                soft_wrap=True,
            )
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    outside = [number for number in ids if not 0 <= number < vocab_size]
    if outside:
        raise ValueError(f"prompt token {outside[0]} is outside the vocabulary of {vocab_size} ids")
    return ids


def _parse_ids(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for word in words:
        try:
            int(word)
        except ValueError:
            raise ValueError(f"{word!r} in --prompt-ids {text} is not a token id; give integers, 5,17,...") from None
    return [int(word) for word in words]
