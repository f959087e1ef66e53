"""What a method is, in a few words: the row of every table and the section of docs/methods.md that speak of it."""

from collections.abc import Mapping
from typing import NamedTuple


class Card(NamedTuple):
    """A method in words; `docs/methods.md` is made of these.

    Attributes:
      title: its name in print.
      paper: arXiv number, or another place where it is published; methods are listed in this order.
      reuses: what a forward does not compute again.
      refreshes: what is computed again, and when.
      commits: which predictions become tokens.
      state: what it remembers between forwards.
      rows: by kind of forward, the rows that pass the feed-forward part, mean over layers, in the letters of
        `polestar_jax.types`, `start` being the block's first slot.
      extra: work beside those rows.
      twin: what it must equal, and under which fields (contract 3).
    """

    title: str
    paper: str
    reuses: str
    refreshes: str
    commits: str
    state: str
    rows: Mapping[str, str]
    extra: str
    twin: str
