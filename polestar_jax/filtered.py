"""Sampling from the likeliest tokens: temperature, top-p and top-k, as Dream's public code and Hugging Face have it."""

import jax
import jax.numpy as jnp

from polestar_jax.head import choose, gumbel_noise
from polestar_jax.rows import iota
from polestar_jax.types import Spec, pytree, static


@pytree
class Filtered:
    """A draw from the tempered and filtered distribution, which confidences and signals are taken from too.

    [MASK] is never drawn, and takes no place among the tokens that a filter keeps.

    Attributes:
      temperature: None is greedy, and leaves the logits as they are.
      top_p: keep the likeliest tokens, in order, up to the first at which their probabilities add up to more than this.
      top_k: keep this many of the likeliest tokens, and those that tie with the last.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = static(default=None)

    def problems(self, spec: Spec) -> list[str]:
        found = []
        if self.temperature is not None and not self.temperature > 0:
            found.append(f"temperature={self.temperature} must be greater than 0; leave it out for greedy decoding")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            found.append(f"top_p={self.top_p} must be greater than 0 and at most 1")
        if self.top_k is not None and not 0 < self.top_k <= spec.model.config.vocab_size:
            found.append(f"top_k={self.top_k} must be between 1 and the vocabulary's {spec.model.config.vocab_size}")
        return found

    def adjust(self, spec: Spec, logits: jax.Array) -> jax.Array:
        """Logits float32 `[B, R, V]`, the tokens that the filters reject at the least finite number."""
        if self.temperature is not None:
            logits = logits / self.temperature
        if self.top_p is None and self.top_k is None:
            return logits
        reject = jnp.finfo(jnp.float32).min
        logits = jnp.where(iota(logits.shape[-1])[None] == spec.model.config.mask_id, reject, logits)
        if self.top_p is not None:
            order = jnp.argsort(-logits, axis=-1, stable=True)
            probability = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
            before = jnp.cumsum(probability, axis=-1) - probability
            kept = (before <= self.top_p).at[..., 0].set(True)
            kept = jnp.put_along_axis(jnp.zeros_like(kept), order, kept, axis=-1, inplace=False)
            logits = jnp.where(kept, logits, reject)
        if self.top_k is not None:
            least = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits >= least, logits, reject)
        return logits

    def sample(self, spec: Spec, logits: jax.Array, slot: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `Greedy.sample`, of adjusted logits."""
        noisy = logits if self.temperature is None else logits + gumbel_noise(spec, logits, slot, keys)
        return choose(spec, logits, noisy, False)
