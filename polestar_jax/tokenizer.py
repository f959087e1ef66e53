"""From text and chats to token ids and back; what is special is decided here, not by what a user writes."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence

import tokenizers

from polestar_jax.chat import Message, make_messages, render


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
      core: splits text into tokens; one that reads the strings of special tokens as text.
      special: id of every special token by its string.
      names: special tokens by their name in `tokenizer_config.json`, such as `{"bos_token": "<|startoftext|>"}`.
      template: the chat template, or None.
      adds_bos: whether plain text begins with BOS unless asked otherwise.
    """

    core: tokenizers.Tokenizer
    special: Mapping[str, int]
    names: Mapping[str, str]
    template: str | None = None
    adds_bos: bool = False

    @property
    def bos_id(self) -> int | None:
        """The id that a sequence begins with: the tokenizer's own, which need not be that of `config.json`."""
        return self.special.get(self.names.get("bos_token", ""))

    def encode(
        self,
        prompt: str | Sequence[Message],
        *,
        chat: bool = False,
        system: str | None = None,
        bos: bool | None = None,
        special: bool = False,
    ) -> list[int]:
        """The ids of a prompt.

        Args:
          prompt: text, or the turns of a chat, `[{"role": "user", "content": ...}, ...]`.
          chat: make a text the single user turn of a chat. Turns always are a chat.
          system: the system turn of a chat that has none; None leaves it to the template.
          bos: put BOS first, unless it is there already. None does what the checkpoint does: its template for a chat,
            its tokenizer for plain text. False adds none to plain text; a template's own stays.
          special: read special tokens in the prompt, such as `<|endoftext|>`, as what they stand for. If not they are
            text like any other; those of the template itself are special all the same.

        Raises:
          ValueError: there is no chat template, or no BOS; turns that are none; a system turn without a chat.
        """
        if isinstance(prompt, str) and not chat:
            if system is not None:
                raise ValueError("a system turn needs a chat: pass chat=True, or write it into the text")
            ids = self._encode_pieces(prompt, special)
            bos = self.adds_bos if bos is None else bos
        elif self.template is None:
            raise ValueError("this checkpoint has no chat template: give the prompt as plain text")
        else:
            ids = self._encode_chat(self.template, make_messages(prompt, system), special)
        if bos:
            if self.bos_id is None:
                raise ValueError("this checkpoint's tokenizer has no BOS token: leave bos out")
            ids = ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; special tokens are left out unless asked for."""
        return self.core.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens)

    def unknown_words(self, text: str) -> list[str]:
        """The words of a text that the vocabulary lacks, each once; none where every byte is a token."""
        encoded = self.core.encode(text, add_special_tokens=False)
        places = zip(encoded.ids, encoded.offsets, strict=True)
        lacking = {*self.special.values(), self._unknown_id}
        return list(dict.fromkeys(text[start:stop] for token, (start, stop) in places if token in lacking))

    @property
    def delimiters(self) -> tuple[int, ...]:
        """The id of the token that ends a line, or of the full stop where lines have no token; nothing without either.

        What a method that looks for ends of sentences (AdaBlock) takes them for.
        """
        found = (self.core.encode(text, add_special_tokens=False).ids for text in ("\n", "."))
        return next((tuple(ids) for ids in found if len(ids) == 1 and ids[0] != self._unknown_id), ())

    @property
    def _unknown_id(self) -> int | None:
        unknown = getattr(self.core.model, "unk_token", None)
        return None if unknown is None else self.core.token_to_id(unknown)

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Finds special tokens, the longest of those that begin at a place."""
        strings = sorted(filter(None, self.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, strings)) or "(?!)")

    def _encode_pieces(self, text: str, special: bool, shield: str = "") -> list[int]:
        """The ids of a text; `special` says whether special tokens in it are special, `shield` is dropped from text."""
        strings = self._pattern.findall(text) if special else []
        texts = self._pattern.split(text) if special else [text]
        ids = self._encode_text(texts[0].replace(shield, ""))
        for string, following in zip(strings, texts[1:], strict=True):
            ids += [self.special[string], *self._encode_text(following.replace(shield, ""))]
        return ids

    def _encode_text(self, text: str) -> list[int]:
        ids = self.core.encode(text, add_special_tokens=False).ids
        strays = set(ids) & set(self.special.values())
        if not strays:
            return ids
        # A vocabulary of whole words finds the string of a special token like any other word.
        unknown = self._unknown_id
        if unknown is None:
            raise ValueError(f"the tokenizer turns the text {text!r} into special tokens {sorted(strays)}")
        return [unknown if token in strays else token for token in ids]

    def _encode_chat(self, template: str, messages: Sequence[Message], special: bool) -> list[int]:
        """The ids of a rendered chat.

        A special token in a turn is shielded by a character that occurs nowhere else, so that only the template's own
        are found in the rendered text. It is taken out afterwards, and text is split as one with its surroundings.
        """
        if special:
            return self._encode_pieces(render(template, messages, self.names), True)
        everything = {*template, *"".join(turn["content"] for turn in messages)}
        shield = next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in everything)
        shielded = [{**turn, "content": self._break_special(turn["content"], shield)} for turn in messages]
        return self._encode_pieces(render(template, shielded, self.names), True, shield)

    def _break_special(self, text: str, shield: str) -> str:
        """The text with a shield inside every special token; more than one round where they overlap."""
        while self._pattern.search(text):
            text = self._pattern.sub(lambda found: found[0][0] + shield + found[0][1:], text)
        return text
