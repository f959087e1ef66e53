"""Published models by name: their shapes, for plans and tests that need no weights."""

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

PUBLISHED = {"llada-8b": Transformer(LLADA_8B)}
