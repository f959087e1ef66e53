"""The language model that lm-eval sees: prompts go through one jitted decode, in batches of few shapes."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from polestar_jax import make_decode, pad_prompts
from polestar_jax.evaluation.answers import Answers, fingerprint, key_of
from polestar_jax.evaluation.likelihood import estimate
from polestar_jax.evaluation.stops import cut, first_unfilled
from polestar_jax.metrics import before_eos, measure
from polestar_jax.types import Method, Model

CHATS = ("raw", "single_user", "multiturn")
_TURNS = "\x02turns\x02"  # marks a context that is a list of turns; no text of a benchmark begins with it


class PolestarLM(LM):
    """A checkpoint with a decoding method, for `lm_eval.simple_evaluate(model=PolestarLM(...), tasks=[...])`.

    Attributes:
      records: what every request cost, by `(task, document, repeat)`: forwards, rows, tokens, TPF and more.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        tokenizer: Any,
        method: Method,
        *,
        gen_length: int,
        name: str,
        batch_size: int = 1,
        bucket: int = 64,
        chat: str = "raw",
        system: str | None = None,
        bos: bool | None = None,
        truncate: bool = False,
        answers: str | None = None,
        seed: int = 0,
        samples: int = 128,
        group: int = 16,
        likelihood: str | None = None,
    ):
        """
        Args:
          model, params, tokenizer: as `polestar_jax.load` returns them.
          method: of `polestar_jax.methods`.
          gen_length: G of every answer; lm-eval's `max_gen_toks` is not looked at.
          name: of the checkpoint, for the record and for telling answers apart.
          batch_size: prompts decoded together.
          bucket: prompts are padded to a multiple of this, which bounds the number of compilations by
            (trained context - G) / bucket.
          chat: "raw" text, "single_user" (the whole few-shot text as one user turn, as the papers ran instruct models),
            or "multiturn" (every worked example its own pair of turns; lm-eval's `apply_chat_template`).
          system: the system turn of a chat.
          bos: begin plain text with BOS; None does what the tokenizer does.
          truncate: cut prompts that are too long on the left, as lm-eval's own models do; else they are an error.
          answers: file of answers that are already there, appended to; None remembers nothing.
          seed: of methods that draw and of the likelihood's masks.
          samples: masked copies per likelihood; a multiple of `group`.
          group: copies that share one draw of how much is masked.
          likelihood: "llada" or "dream", whose estimator; None takes dream's where logits are shifted.
        """
        super().__init__()
        if chat not in CHATS:
            raise ValueError(f"chat={chat!r} must be one of {', '.join(CHATS)}")
        if batch_size < 1 or bucket < 1:
            raise ValueError(f"batch_size={batch_size} and bucket={bucket} must be at least 1")
        if samples % group:
            raise ValueError(f"samples={samples} must be a multiple of group={group}")
        if gen_length >= model.config.max_length:
            raise ValueError(f"gen_length={gen_length} leaves no room for a prompt in {model.config.max_length} tokens")
        if tokenizer is None:
            raise ValueError(f"{name} has no tokenizer, and benchmarks are text")
        self.model, self.params, self.tokenizer = model, params, tokenizer
        self.decode = make_decode(model, method, gen_length=gen_length)
        self.batch_size, self.bucket, self.chat, self.system, self.bos = batch_size, bucket, chat, system, bos
        self.truncate, self.seed, self.samples, self.group = truncate, seed, samples, group
        self.likelihood = likelihood or ("dream" if model.shift else "llada")
        self.answers = Answers(answers)
        self.identity = [name, fingerprint(params), repr(method), gen_length, chat, system, bos, truncate, seed]
        self.records: dict[tuple[str, int, int], dict[str, Any]] = {}
        self.shapes: set[tuple[int, int]] = set()

    @property
    def tokenizer_name(self) -> str:
        return str(self.identity[0])

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.tokenizer.template or ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The turns as they are; they become ids where text does, so that what a user writes stays text."""
        return _TURNS + json.dumps(chat_history)

    def encode(self, context: str) -> list[int]:
        """The ids of a request's context, by the chat mode."""
        if context.startswith(_TURNS):
            return self.tokenizer.encode(json.loads(context[len(_TURNS) :]), system=self.system)
        if self.chat == "single_user":
            return self.tokenizer.encode(context, chat=True, system=self.system)
        return self.tokenizer.encode(context, bos=self.bos)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers in the order of `requests`, each cut at its end of text and its stop strings."""
        keys = [key_of(*self.identity, request.args) for request in requests]
        ids = {i: self.fit(requests[i]) for i, key in enumerate(keys) if self.answers.get(key) is None}
        for batch in self._batches(ids):
            decoded = zip(batch, self._decode_batch([ids[i] for i in batch]), strict=True)
            self.answers.add({keys[i]: self._read(*row, _stops(requests[i])) for i, row in decoded})
        answers = []
        for request, key in zip(requests, keys, strict=True):
            answer = self.answers.get(key)
            assert answer is not None
            self.records[(request.task_name or "", request.doc_id or 0, request.idx)] = answer["record"]
            answers.append(answer["text"])
        return answers

    def fit(self, request: Any) -> list[int]:
        """The ids of a request's prompt, which has room before the answer."""
        prompt = self.encode(request.args[0])
        room = self.model.config.max_length - self.decode.gen_length
        if self.truncate:
            return prompt[-room:]
        if not 0 < len(prompt) <= room:
            raise ValueError(
                f"the prompt of document {request.doc_id} of {request.task_name} has {len(prompt)} tokens; with"
                f" gen_length={self.decode.gen_length} there must be 1 to {room}: use fewer examples, or truncate"
            )
        return prompt

    def _batches(self, ids: dict[int, list[int]]) -> list[list[int]]:
        """Requests that are decoded together: of one bucket, in order, `batch_size` at a time."""
        buckets: dict[int, list[int]] = {}
        for i, prompt in ids.items():
            buckets.setdefault(self._padded(len(prompt)), []).append(i)
        step = self.batch_size
        return [rows[at : at + step] for _, rows in sorted(buckets.items()) for at in range(0, len(rows), step)]

    def _padded(self, length: int) -> int:
        room = self.model.config.max_length - self.decode.gen_length
        return min(-(-length // self.bucket) * self.bucket, room)

    def _decode_batch(self, prompts: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray, dict[str, Any]]]:
        """Tokens, what is filled, and the costs of every prompt. A batch that is not full is filled up with copies."""
        length = self._padded(max(map(len, prompts)))
        self.shapes.add((self.batch_size, length))
        padded = pad_prompts(prompts + prompts[:1] * (self.batch_size - len(prompts)), length)
        # The key of a prompt hangs on nothing but itself, so that batches and the order of documents change no draw.
        digests = [hashlib.sha256(repr(ids).encode()).digest()[:4] for ids in prompts]
        words = jnp.asarray([int.from_bytes(digest) for digest in digests], jnp.uint32)
        words = jnp.resize(words, (self.batch_size,))
        keys = jax.vmap(lambda word: jax.random.fold_in(jax.random.key(self.seed), word))(words)
        output, _ = self.decode(self.params, self.decode.init(keys, length), padded)
        output = jax.device_get(output)
        metrics = measure(output, eos_id=self.model.config.eos_id, kinds=self.decode.kinds)
        rows = []
        for row in range(len(prompts)):
            forwards = int(metrics.forwards[row])
            record = {
                "prompt_tokens": len(prompts[row]),
                "tokens": int(metrics.tokens[row]),
                "tokens_to_eos": int(metrics.tokens_to_eos[row]),
                "forwards": forwards,
                "tpf": float(metrics.tokens[row]) / max(forwards, 1),
                "rows": float(metrics.rows[row]),
                "refreshes": int(metrics.refreshes[row]),
            }
            rows.append((output.tokens[row], output.filled[row], record))
        return rows

    def _read(self, tokens: np.ndarray, filled: np.ndarray, record: dict[str, Any], stops: list[str]) -> dict:
        """An answer to remember. A stop string counts only where no mask precedes it: a mask may become anything."""
        certain = tokens[: first_unfilled(filled.tolist())]
        text = self.tokenizer.decode(before_eos(certain, self.model.config.eos_id).tolist())
        if len(certain) < len(tokens) and cut(text, stops) == text and self.model.config.eos_id not in certain:
            rest = tokens[len(certain) :][filled[len(certain) :]]
            text += self.tokenizer.decode(before_eos(rest, self.model.config.eos_id).tolist())
        else:
            text = cut(text, stops)
        return {"text": text, "record": record}

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Estimates by masking; whether the target is the greedy answer is not looked into, and False."""
        answers = []
        for request in requests:
            context, target = _move_spaces(*request.args)
            key = key_of(*self.identity, "likelihood", self.likelihood, self.samples, self.group, context, target)
            known = self.answers.get(key)
            if known is None:
                known = self._estimate(context, target, key)
                self.answers.add({key: known})
            self.records[(request.task_name or "", request.doc_id or 0, request.idx)] = {"error": known["error"]}
            answers.append((known["value"], False))
        return answers

    def _estimate(self, context: str, target: str, key: str) -> dict[str, float]:
        prompt = self.encode(context)
        whole = self.encode(context + target)
        if whole[: len(prompt)] != prompt:  # a token across the border belongs to the target
            whole = prompt + self.tokenizer.encode(target, bos=False)
        answer = whole[len(prompt) :]
        if self.likelihood == "dream":
            answer = [*answer, self.model.config.eos_id]
        room = self.model.config.max_length
        if not prompt or len(whole) > room:
            raise ValueError(
                f"a likelihood request has {len(prompt)} + {len(answer)} tokens; there must be 1 to {room}"
            )
        pad = lambda length, step: -(-length // step) * step
        padded_prompt = pad_prompts([prompt], pad(len(prompt), self.bucket)).tokens[0]
        padded_answer = jnp.asarray(answer + [0] * (pad(len(answer), 8) - len(answer)), jnp.int32)
        sizes = jnp.asarray([len(prompt), len(answer)], jnp.int32)
        random = jax.random.fold_in(jax.random.key(self.seed), int(key[:8], 16))
        settings = (self.model, self.samples, self.group, self.likelihood)
        value, error = estimate(*settings, self.params, padded_prompt, padded_answer, sizes, random)
        return {"value": float(value), "error": float(error)}

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError(
            "a diffusion model has no left-to-right likelihood of a whole text: use tasks with a context and a target"
        )


def _stops(request: Any) -> list[str]:
    """The stop strings of a request."""
    stops = request.args[1].get("until") or []
    return [stops] if isinstance(stops, str) else list(stops)


def _move_spaces(context: str, target: str) -> tuple[str, str]:
    """Spaces at the end of the context belong to the target, as tokenizers put them there."""
    kept = context.rstrip(" ")
    return kept, context[len(kept) :] + target
