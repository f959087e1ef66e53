"""Chat templates: Jinja, rendered in a sandbox, so that a checkpoint's template cannot run code."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, str]
"""A turn: `{"role": "system" | "user" | "assistant", "content": text}`."""

ROLES = ("system", "user", "assistant")


def make_messages(prompt: str | Sequence[Message], system: str | None = None) -> list[dict[str, str]]:
    """The turns of a chat: one user turn for a text, after a system turn if there is one.

    Raises:
      ValueError: naming the turn that is not one.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not turns:
        raise ValueError("the chat has no turns: give at least one, {'role': 'user', 'content': ...}")
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or set(turn) != {"role", "content"}:
            raise ValueError(f"turn {number} of the chat is {turn!r}: it must have exactly 'role' and 'content'")
        if turn["role"] not in ROLES:
            raise ValueError(f"turn {number} of the chat has role {turn['role']!r}, not one of {', '.join(ROLES)}")
        if not isinstance(turn["content"], str):
            raise ValueError(f"turn {number} of the chat has content {turn['content']!r}: it must be text")
    if system is not None:
        if turns[0]["role"] == "system":
            raise ValueError("the chat begins with a system turn and another one is given beside it: drop one")
        turns.insert(0, {"role": "system", "content": system})
    return [dict(turn) for turn in turns]


def render(template: str, messages: Sequence[Message], names: Mapping[str, str]) -> str:
    """The text of a chat, ending where the assistant is to answer.

    The environment is that of `transformers`' templates: block tags swallow their line, `loopcontrols`,
    `raise_exception`.

    Args:
      template: of the checkpoint.
      messages: the turns.
      names: special tokens by name, such as `{"bos_token": "<|startoftext|>"}`.

    Raises:
      ValueError: the template is broken, or refuses these turns.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **names)
    except TemplateError as error:
        raise ValueError(f"the chat template cannot render these turns: {error}") from error


def _refuse(message: Any) -> NoReturn:
    raise TemplateError(str(message))
