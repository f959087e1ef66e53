"""Drift-aware decoding for diffusion language models in JAX: Polestar and the methods it is compared with."""

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
