"""How exact the drift ops are, against float64: `python benchmarks/kernel_exactness.py`. CPU, a few seconds.

Drift of 32 rows of 8 heads of 128 over 1280 keys, at three distances between old and new queries, with the old scores
kept in several types. For each type the log sum is that of the scores as they were kept, so that the drift is a true
divergence from a distribution next to the old one.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.drift_attention import DriftReference, drift_attention

HEADS, ROWS, KEYS, SIZE = 8, 32, 1280, 128


def log_sum(scores: np.ndarray) -> np.ndarray:
    top = scores.max(-1, keepdims=True)
    return (np.log(np.exp(scores - top).sum(-1, keepdims=True)) + top)[..., 0]


def main() -> None:
    random = np.random.default_rng(0)
    half = lambda *size: random.normal(size=size).astype(ml_dtypes.bfloat16)
    key, value = half(1, HEADS, KEYS, SIZE), half(1, HEADS, KEYS, SIZE)
    mask = jnp.ones((1, KEYS), bool)
    # Spread of the scores: of attention that is broad (2), and that has a few strong keys (6).
    for spread in (2.0, 6.0):
        query = (spread * random.normal(size=(1, ROWS, HEADS, SIZE))).astype(ml_dtypes.bfloat16)
        scores = lambda query: (
            np.einsum("brha,bhma->bhrm", query.astype(np.float64), key.astype(np.float64)) / SIZE**0.5
        )
        now = scores(query)
        probability = np.exp(now - log_sum(now)[..., None])
        for distance in (0.0, 0.03, 0.3):
            shift = distance * spread * random.normal(size=query.shape)
            before = scores((query.astype(np.float64) + shift).astype(ml_dtypes.bfloat16))
            exact = (probability * (now - before)).sum(-1) - (log_sum(now) - log_sum(before))
            exact = np.maximum(exact, 0).mean(1)
            errors = {}
            for kept in (np.float32, np.float16, ml_dtypes.bfloat16):
                old = before.astype(kept).astype(np.float64)
                reference = DriftReference(jnp.asarray(old, jnp.float32), jnp.asarray(log_sum(old), jnp.float32))
                _, drift, new = drift_attention(*map(jnp.asarray, (query, key, value)), mask, reference)
                errors[np.dtype(kept).name] = np.abs(np.asarray(drift, np.float64) - exact).max()
            print(
                f"scores of spread {spread:.0f}, drift {exact.mean():9.3e}, largest error with old scores in", end=" "
            )
            print(", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
        print(f"log sum: largest error {np.abs(np.asarray(new.log_sum, np.float64) - log_sum(now)).max():.1e}")


if __name__ == "__main__":
    main()
