"""Answers that are already there, a JSON line each: an evaluation that was killed goes on where it was."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def key_of(*parts: Any) -> str:
    """A name for a request: the same for the same words, settings and checkpoint, and for nothing else."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def fingerprint(params: Any) -> str:
    """Tells checkpoints of one shape apart, from a few numbers of every leaf."""
    sums = [np.asarray(jnp.ravel(leaf)[:: max(1, leaf.size // 64)], np.float32) for leaf in jax.tree.leaves(params)]
    return hashlib.sha256(b"".join(each.tobytes() for each in sums)).hexdigest()[:16]


class Answers:
    """A file of answers by key, appended to and synced after every batch.

    Attributes:
      path: of the file, or None to remember nothing.
    """

    def __init__(self, path: str | Path | None):
        self.path = None if path is None else Path(path)
        self._known: dict[str, Any] = {}
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = b""
        if self.path.exists():
            content = self.path.read_bytes()
            whole = content[
                : content.rfind(b"\n") + 1
            ]  # a kill may leave half a line, which the next one must not join
            for line in whole.decode().splitlines():
                record = json.loads(line)
                self._known[record["key"]] = record["answer"]
            if len(whole) < len(content):
                os.truncate(self.path, len(whole))

    def get(self, key: str) -> Any | None:
        return self._known.get(key)

    def add(self, answers: dict[str, Any]) -> None:
        """Remembers answers by key."""
        self._known |= answers
        if self.path is None or not answers:
            return
        with self.path.open("a", encoding="utf-8") as file:
            for key, answer in answers.items():
                file.write(json.dumps({"key": key, "answer": answer}) + "\n")
            file.flush()
            os.fsync(file.fileno())
