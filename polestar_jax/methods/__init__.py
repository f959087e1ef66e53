"""Decoding methods by name: every file here holds one, as a function of its own name, and its `CARD`.

The function returns a `Method`: it composes a cache policy, a commit rule, a block schedule and a sampler.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from polestar_jax.card import Card
from polestar_jax.types import Method

_NAMES = [module.name for module in pkgutil.iter_modules(__path__)]
_MODULES = {name: importlib.import_module(f"{__name__}.{name}") for name in _NAMES}
_ORDER = sorted(_NAMES, key=lambda name: (_MODULES[name].CARD.paper, len(name)))

METHODS: dict[str, Callable[..., Method]] = {name: getattr(_MODULES[name], name) for name in _ORDER}
"""In order of publication."""

CARDS: dict[str, Card] = {name: _MODULES[name].CARD for name in _ORDER}

globals().update(METHODS)  # `methods.polestar` is the function, not its module

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Method]: ...
