"""A decode as frames: the canvas after every forward. On the host, in NumPy, one batch row at a time."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from polestar_jax.decode import Decode
from polestar_jax.types import NO_FORWARD, NOTHING, REVOKED, Reason, StepLog

COLORS = {
    Reason.CONFIDENCE: "#56b4e9",
    Reason.DRIFT: "#e69f00",
    Reason.FORCED: "#cc79a7",
    Reason.SUFFIX: "#009e73",
    Reason.DEPENDENCY: "#f0e442",
}
"""Okabe and Ito's colours, which the colour-blind tell apart too."""

_PROMPT_BLOCKS = 3  # how much of a prompt is shown, in blocks; a window reaches two back


@dataclasses.dataclass(frozen=True)
class Stage:
    """What stays the same from frame to frame.

    Attributes:
      title: the name of the method.
      prompt: text by prompt slot; "" at pads.
      gen_length, block_length: G, S.
      kinds: names of the kinds of forward, `decode.kinds`.
      layers: L.
      text: a token id as a few printable characters.
    """

    title: str
    prompt: tuple[str, ...]
    gen_length: int
    block_length: int
    kinds: tuple[str, ...]
    layers: int
    text: Callable[[int], str]


@dataclasses.dataclass(frozen=True)
class Frame:
    """The canvas after one forward, and what that forward did.

    Attributes:
      forward: its number from 1; 0 is the canvas before the first.
      kind: its name, "" before the first.
      token: int64 `[G]`, `NOTHING` where masked.
      reason: int64 `[G]`, the `Reason` of the commit.
      new: bool `[G]`, committed by this forward.
      computed: float64 `[P + G]`, share of the layers that recomputed the slot.
      block: the block this forward worked on, from 0; before the first forward also 0.
      rows: rows this forward computed, mean over layers.
      total: rows of all forwards so far.
    """

    forward: int
    kind: str
    token: np.ndarray
    reason: np.ndarray
    new: np.ndarray
    computed: np.ndarray
    block: int
    rows: float
    total: float

    @property
    def committed(self) -> int:
        """How many positions are filled."""
        return int((self.token != NOTHING).sum())


def make_stage(decode: Decode, prompt: Sequence[int], tokenizer: Any, title: str = "", pads: int = 0) -> Stage:
    """The stage of one batch row.

    Args:
      decode: the decoder.
      prompt: token ids, without pads.
      tokenizer: of the checkpoint; None shows ids.
      title: the method's own name if empty.
      pads: how many pads are left of the prompt.
    """
    text = make_reader(tokenizer, decode.model.config.eos_id)
    return Stage(
        title=title or decode.method.name,
        prompt=("",) * pads + tuple(text(int(token)) for token in prompt),
        gen_length=decode.gen_length,
        block_length=decode.method.schedule.span(decode.gen_length),
        kinds=decode.kinds,
        layers=decode.model.config.layers,
        text=text,
    )


def make_reader(tokenizer: Any, eos_id: int) -> Callable[[int], str]:
    """A function from a token id to a few printable characters: the id itself without a tokenizer, "eos" for EOS."""

    @functools.cache
    def read(token: int) -> str:
        if token == eos_id:
            return "eos"
        if tokenizer is None:
            return str(token)
        text = tokenizer.decode([token], skip_special_tokens=False).replace("\n", "↵").strip()
        return "".join(letter if letter.isprintable() else "�" for letter in text) or "␣"  # never "", which is a pad

    return read


def first_frame(stage: Stage) -> Frame:
    """The canvas before the first forward: nothing but masks."""
    none = np.zeros(stage.gen_length, np.int64)
    computed = np.zeros(len(stage.prompt) + stage.gen_length)
    return Frame(0, "", none + NOTHING, none + Reason.NONE, none > 0, computed, 0, 0.0, 0.0)


def next_frame(stage: Stage, frame: Frame, entry: StepLog, row: int = 0) -> Frame:
    """The frame after one more forward.

    Args:
      stage: of this decode.
      frame: the frame before.
      entry: what the forward did, without the T axis, as `decode.step` returns it.
      row: the batch row to follow; where it waited, the frame stays as it is.
    """
    kind = int(entry.kind[row])
    if kind == NO_FORWARD:
        return frame
    committed = np.asarray(entry.token[row], np.int64)
    new, revoked = committed >= 0, committed == REVOKED
    # The schedule works on the first block with a mask in it.
    block = int(np.argmax(frame.token == NOTHING)) // stage.block_length
    rows = float(entry.rows[row])
    return Frame(
        forward=frame.forward + 1,
        kind=stage.kinds[kind],
        token=np.where(revoked, NOTHING, np.where(new, committed, frame.token)),
        reason=np.where(revoked, Reason.NONE, np.where(new, entry.reason[row], frame.reason)),
        new=new,
        computed=np.asarray(entry.computed[row]) / stage.layers,
        block=block,
        rows=rows,
        total=frame.total + rows,
    )


def replay_log(stage: Stage, log: StepLog, row: int = 0) -> Iterator[Frame]:
    """Yields the frames of a finished decode, the empty canvas first.

    Args:
      stage: of this decode.
      log: of `DecodeOutput`.
      row: the batch row to follow.
    """
    planes = {field.name: np.asarray(getattr(log, field.name))[row] for field in dataclasses.fields(log)}
    frame = first_frame(stage)
    yield frame
    for forward in range(int((planes["kind"] != NO_FORWARD).sum())):
        frame = next_frame(stage, frame, StepLog(**{name: plane[forward][None] for name, plane in planes.items()}))
        yield frame


class Line(NamedTuple):
    """Neighbouring slots that are drawn in one line.

    Attributes:
      block: their block; -1 for the prompt.
      slots: into `[P + G]`.
    """

    block: int
    slots: range


def lay_out(stage: Stage, most: int) -> list[Line]:
    """Lines of at most `most` slots: the end of the prompt, then the blocks, each from a line of its own on.

    The lines of a block are about as long as one another.
    """
    size = stage.block_length
    per_line = -(-size // -(-size // most))
    first = next((slot for slot, word in enumerate(stage.prompt) if word), 0)
    parts = [(-1, range(max(first, len(stage.prompt) - _PROMPT_BLOCKS * size), len(stage.prompt)))]
    for block in range(-(-stage.gen_length // size)):
        start = len(stage.prompt) + block * size
        parts.append((block, range(start, min(start + size, len(stage.prompt) + stage.gen_length))))
    return [
        Line(block, part[offset : offset + per_line])
        for block, part in parts
        for offset in range(0, len(part), per_line)
    ]
