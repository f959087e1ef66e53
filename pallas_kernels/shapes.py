"""Named shapes of the ops' arguments, for tests and benchmarks: published models as they are decoded, and tiny ones."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one decode.

    Attributes:
      batch: B.
      rows: R, of a block: S, one more with shifted logits.
      window: W.
      selected: window rows that a refresh computes, capacity included.
      keys: cached positions.
      heads, kv_heads, head_size: H, Hkv, A.
      model_size: D.
      vocabulary: V.
      clusters: K.
      dtype: of weights and activations.
    """

    batch: int
    rows: int
    window: int
    selected: int
    keys: int
    heads: int
    kv_heads: int
    head_size: int
    model_size: int
    vocabulary: int
    clusters: int = 8
    dtype: str = "bfloat16"


_LLADA = Shape(1, 32, 96, 48, 1280, 32, 32, 128, 4096, 126464)
_DREAM = Shape(1, 33, 96, 48, 1280, 28, 4, 128, 3584, 152064)

REAL = {
    "llada-8b": _LLADA,
    "llada-8b refresh": dataclasses.replace(_LLADA, rows=160, keys=4096, selected=96),
    "llada-8b batch 8": dataclasses.replace(_LLADA, batch=8),
    # No size a multiple of its tile, and some not even of what is copied at once.
    "llada-8b uneven": dataclasses.replace(_LLADA, batch=2, rows=31, window=12, selected=7, keys=1288),
    "dream-7b": _DREAM,
    "dream-7b refresh": dataclasses.replace(_DREAM, rows=160, keys=4096, selected=96),
}

TINY = {
    # Rows, keys and words fill no tile; one window row.
    "ragged": Shape(2, 5, 1, 1, 72, 4, 2, 64, 256, 200, clusters=3),
    # Two tiles of everything, the second one barely begun.
    "two tiles": Shape(1, 35, 67, 66, 136, 4, 2, 64, 512, 304, clusters=2),
    # No groups of heads; a head of 128; a single row.
    "one row": Shape(1, 1, 3, 2, 24, 2, 2, 128, 256, 64, clusters=8),
}
