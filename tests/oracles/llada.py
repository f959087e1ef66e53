"""A Llama-like block in plain NumPy, float64, one row of the batch: what a decode by hand needs of LLaDA or Dream.

Keys are kept without rotary position and rotated where they are attended to, the other way round than the library.
"""

import numpy as np


def softmax(scores):
    """Over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class Weights:
    """The parameters of a LLaDA or a Dream in float64, and its equations."""

    def __init__(self, params, config):
        wide = lambda tree: {k: wide(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, float)
        self.tree, self.config = wide(params), config
        self.head_size = config.model_size // config.heads

    def norm(self, x, weight):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.config.epsilon) * weight

    def embed(self, tokens):
        return self.tree["embedding"][tokens]

    def project(self, layer, hidden):
        """Queries `[R, H, A]`, keys and values `[R, Hkv, A]`, none of them rotated."""
        part = self.tree["layers"][layer]
        x = self.norm(hidden, part["attention_norm"]["weight"])
        linear = lambda name: x @ part[name]["weight"].T + (part[name]["bias"] if self.config.bias else 0)
        split = lambda name: linear(name).reshape(len(x), -1, self.head_size)
        return split("query"), split("key"), split("value")

    def rotate(self, x, positions):
        """Rotary position of `[R, H, A]`: pairs (i, i + A/2) turn by position * theta^(-2i/A)."""
        half = self.head_size // 2
        turned = np.empty_like(x)
        for row, position in enumerate(positions):
            for i in range(half):
                angle = position * self.config.rope_theta ** (-2 * i / self.head_size)
                a, b = x[row, :, i], x[row, :, i + half]
                turned[row, :, i] = a * np.cos(angle) - b * np.sin(angle)
                turned[row, :, i + half] = b * np.cos(angle) + a * np.sin(angle)
        return turned

    def attention(self, query, key):
        """Distributions `[H, R, N]` of `query` `[R, H, A]` over `key` `[N, Hkv, A]`."""
        share = query.shape[1] // key.shape[1]
        scores = [query[:, head] @ key[:, head // share].T for head in range(query.shape[1])]
        return softmax(np.array(scores) / np.sqrt(self.head_size))

    def weigh(self, attention, value):
        """Attended values `[R, H, A]`."""
        share = attention.shape[0] // value.shape[1]
        return np.stack([attention[head] @ value[:, head // share] for head in range(len(attention))], axis=1)

    def finish(self, layer, hidden, attended):
        """Output projection, residual, gated feed-forward, residual."""
        part = self.tree["layers"][layer]
        hidden = hidden + attended.reshape(len(hidden), -1) @ part["output"]["weight"].T
        x = self.norm(hidden, part["feed_forward_norm"]["weight"])
        gate = x @ part["gate"]["weight"].T
        return hidden + (gate / (1 + np.exp(-gate)) * (x @ part["up"]["weight"].T)) @ part["down"]["weight"].T

    def logits(self, hidden):
        head = self.tree["embedding"] if self.config.tied else self.tree["head"]["weight"]
        return self.norm(hidden, self.tree["norm"]["weight"]) @ head.T
