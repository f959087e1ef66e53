"""Drift-aware decoding for diffusion language models in JAX: Polestar and the methods it is compared with."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polestar_jax import methods
    from polestar_jax.decode import Decode, make_decode
    from polestar_jax.loading import load
    from polestar_jax.prompts import pad_prompts
    from polestar_jax.types import DecodeOutput, DecodeState, Method, Prompt, Reason, StepLog

__all__ = [
    "Decode",
    "DecodeOutput",
    "DecodeState",
    "Method",
    "Prompt",
    "Reason",
    "StepLog",
    "load",
    "make_decode",
    "methods",
    "pad_prompts",
]

_MODULES = {"Decode": "decode", "make_decode": "decode", "load": "loading", "pad_prompts": "prompts"}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `polestar --help` does not wait for jax."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "methods":
        return importlib.import_module("polestar_jax.methods")
    return getattr(importlib.import_module(f"polestar_jax.{_MODULES.get(name, 'types')}"), name)
