"""Name tables: which tensor of a Hugging Face folder is which of our parameters.

Our parameters are a nested dict; a dotted path names one of its leaves and `{}` stands for the layer. A table holds the
same tensors under one family's names. Weights keep their `[out, in]` orientation, so a name is all that changes.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Naming:
    """One way to name the tensors of a checkpoint.

    Attributes:
      title: what messages call it.
      table: our dotted path to the source name, with `{}` for the layer.
      ignored: pattern of source names that hold nothing to load.
    """

    title: str
    table: Mapping[str, str]
    ignored: str = r".*\.rotary_emb\.inv_freq"

    def source(self, path: str) -> str:
        """The source name of our dotted path, such as `layers.3.query.weight`."""
        template = re.sub(r"(?<=\.)\d+(?=\.)", "{}", path)
        return self.table[template].format(*re.findall(r"(?<=\.)\d+(?=\.)", path))

    def ignores(self, source: str) -> bool:
        """Whether a source tensor holds nothing to load: buffers that some exporters write beside the weights."""
        return re.fullmatch(self.ignored, source) is not None


LLADA = Naming(
    "LLaDA",
    {
        "embedding": "model.transformer.wte.weight",
        "layers.{}.attention_norm.weight": "model.transformer.blocks.{}.attn_norm.weight",
        "layers.{}.query.weight": "model.transformer.blocks.{}.q_proj.weight",
        "layers.{}.key.weight": "model.transformer.blocks.{}.k_proj.weight",
        "layers.{}.value.weight": "model.transformer.blocks.{}.v_proj.weight",
        "layers.{}.output.weight": "model.transformer.blocks.{}.attn_out.weight",
        "layers.{}.feed_forward_norm.weight": "model.transformer.blocks.{}.ff_norm.weight",
        "layers.{}.gate.weight": "model.transformer.blocks.{}.ff_proj.weight",
        "layers.{}.up.weight": "model.transformer.blocks.{}.up_proj.weight",
        "layers.{}.down.weight": "model.transformer.blocks.{}.ff_out.weight",
        "norm.weight": "model.transformer.ln_f.weight",
        "head.weight": "model.transformer.ff_out.weight",
    },
)

LLAMA = Naming(
    "LLaMA-like",
    {
        "embedding": "model.embed_tokens.weight",
        "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
        "layers.{}.query.weight": "model.layers.{}.self_attn.q_proj.weight",
        "layers.{}.key.weight": "model.layers.{}.self_attn.k_proj.weight",
        "layers.{}.value.weight": "model.layers.{}.self_attn.v_proj.weight",
        "layers.{}.output.weight": "model.layers.{}.self_attn.o_proj.weight",
        "layers.{}.feed_forward_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
        "layers.{}.gate.weight": "model.layers.{}.mlp.gate_proj.weight",
        "layers.{}.up.weight": "model.layers.{}.mlp.up_proj.weight",
        "layers.{}.down.weight": "model.layers.{}.mlp.down_proj.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
)

DREAM = Naming(
    "Dream",
    {
        **LLAMA.table,
        "layers.{}.query.bias": "model.layers.{}.self_attn.q_proj.bias",
        "layers.{}.key.bias": "model.layers.{}.self_attn.k_proj.bias",
        "layers.{}.value.bias": "model.layers.{}.self_attn.v_proj.bias",
    },
)


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a nested dict of parameters by dotted path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def unflatten(abstract: Mapping[str, Any], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of `abstract` with the leaf of each dotted path taken from `leaves`."""
    paths, structure = jax.tree_util.tree_flatten_with_path(abstract)
    return jax.tree_util.tree_unflatten(
        structure, [leaves[".".join(str(key.key) for key in path)] for path, _ in paths]
    )


def choose(namings: Iterable[Naming], abstract: Mapping[str, Any], found: Iterable[str]) -> Naming:
    """The naming that explains most of the source names `found`; the first of `namings` when none does."""
    found, paths = set(found), list(flatten(abstract))
    return max(namings, key=lambda naming: sum(naming.source(path) in found for path in paths))
