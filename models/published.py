"""Published models by name: their shapes, for plans and tests that need no weights."""

from models import dream
from models.transformer import Config, Transformer

LLADA_8B = Config(
    family="llada",
    vocab_size=126464,
    model_size=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    feed_forward=12288,
    max_length=4096,
    rope_theta=500000.0,
    epsilon=1e-5,
    mask_id=126336,
    eos_id=126081,
    dtype="bfloat16",
)

DREAM_7B = Config(
    **dream.TRAITS,
    vocab_size=152064,
    model_size=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    feed_forward=18944,
    max_length=131072,
    rope_theta=1000000.0,
    epsilon=1e-6,
    mask_id=151666,
    eos_id=151643,
    dtype="bfloat16",
)

PUBLISHED = {"llada-8b": Transformer(LLADA_8B), "dream-7b": Transformer(DREAM_7B)}
