"""Decoding methods by name. Each is a function that returns a `Method`: a cache policy, a commit rule, a schedule."""

from polestar_jax.methods.fast_dllm import fast_dllm
from polestar_jax.methods.parallel import parallel
from polestar_jax.methods.polestar import polestar
from polestar_jax.methods.vanilla import vanilla

METHODS = {function.__name__: function for function in (vanilla, parallel, fast_dllm, polestar)}

__all__ = ["METHODS", "fast_dllm", "parallel", "polestar", "vanilla"]
