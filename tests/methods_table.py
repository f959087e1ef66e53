"""The methods and model families of the contract tests, and one ragged scenario that they are decoded on.

A method or a family joins every contract by a line in `METHODS` or `FAMILIES`. Decodes are cached: the contracts look
at the same runs, so that each method is compiled for few shapes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import dream
from models.transformer import Config, Transformer
from polestar_jax import Prompt, make_decode, methods
from polestar_jax.composition import combine

GEN_LENGTH, BLOCK_LENGTH = 16, 4

TINY = Config(
    family="llada",
    vocab_size=40,
    model_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    feed_forward=48,
    max_length=96,
    rope_theta=100.0,
    epsilon=1e-5,
    mask_id=39,
    eos_id=38,
)

# Dream differs in whom a row predicts, in biases, and in rotary arithmetic, which float32 does not tell apart.
DREAM = dataclasses.replace(TINY, **dream.TRAITS)

FAMILIES = {"llada": Transformer(TINY), "dream": Transformer(DREAM)}


def _whole(block_length: int, **numbers):
    """Dream's sampler, which takes no block length."""
    return methods.dream(**numbers)


def elastic(block_length: int, **fields):
    """A window of masks instead of blocks, as small as the blocks of the others."""
    return methods.elastic_cache(window=block_length, **fields)


_GATE = {"tau": 0.8, "alpha": 2.0, "suffix_tau": 0.5}  # random weights are less sure of themselves than trained ones
_STABLE = {"tau_c": 0.3, "eps_kl": 0.8}
_GRAPH = {"tau_high": 0.8, "tau_induce": 0.4, "tau_sink": 0.2, "tau_edge": 0.1, "tau_low": 0.3}
_DELIMITED = {"threshold": 0.6, "delimiter_threshold": 0.2, "delimiters": tuple(range(0, 38, 4))}
_INTERVALS = {"prompt_interval": 5, "response_interval": 3}
_WINDOW = {"window": 2, "budget": 2, "capacity": 6}


def dual_slowfast(threshold=0.6, **numbers):
    """Fast-dLLM's cache under the cycles of SlowFast: blocks entered by the one, cut off by the other."""
    block_length = numbers.pop("block_length")
    slowfast = methods.slowfast(floor=0.2, explore=3, threshold=threshold, block_length=block_length, **numbers)
    return combine(methods.fast_dllm(block_length=block_length), slowfast)


def d2cache_klass(tau_c=0.4, **numbers):
    """d2Cache's rows, whose predictions KLASS follows as far as they are computed."""
    block_length = numbers.pop("block_length")
    klass = methods.klass(tau_c=tau_c, eps_kl=0.5, block_length=block_length, **numbers)
    return combine(methods.d2cache(current_k=6, capacity=12, block_length=block_length), klass)


METHODS = {
    "vanilla": functools.partial(methods.vanilla),
    "vanilla_random": functools.partial(methods.vanilla, remasking="random", steps=8),
    "vanilla_temperature": functools.partial(methods.vanilla, temperature=0.8),
    "vanilla_guidance": functools.partial(methods.vanilla, guidance=1.5),
    "parallel": functools.partial(methods.parallel, threshold=0.6),
    "parallel_factor": functools.partial(methods.parallel, factor=1.2),
    "dual": functools.partial(methods.fast_dllm, threshold=0.6),
    "prefix": functools.partial(methods.fast_dllm, cache="prefix", threshold=0.6),
    "dual_steps": functools.partial(methods.fast_dllm, steps=8),
    "dual_entry": functools.partial(methods.fast_dllm, first_token="entry", threshold=0.6),
    "prefix_instead": functools.partial(methods.fast_dllm, cache="prefix", first_token="instead", threshold=0.6),
    "hierarchy": functools.partial(
        methods.hierarchy, "release", threshold=0.6, low_threshold=0.2, remask_threshold=0.7
    ),
    "localleap": functools.partial(methods.localleap, threshold=0.6, relaxed=0.3, radius=1),
    "dimple": functools.partial(methods.dimple, threshold=0.6),
    "prophet": functools.partial(methods.prophet, early=4.0, mid=3.0, late=2.0, answer_start=9, answer_length=3),
    "slowfast": functools.partial(methods.slowfast, floor=0.2, threshold=0.6, explore=3),
    "dual_slowfast": dual_slowfast,
    "d2cache_klass": d2cache_klass,
    "wino": functools.partial(methods.wino, threshold=0.5, threshold_back=0.95),
    "dpad": functools.partial(methods.dpad, threshold=0.6, window=9),
    "dpad_prefix": functools.partial(
        methods.dpad, cache="prefix", draw="uniform", preserved=3, window=7, threshold=0.6, stop_at_eos=True
    ),
    "freecache": functools.partial(methods.freecache, threshold=0.6),
    "klass": functools.partial(methods.klass, **_STABLE),
    "klass_dual": functools.partial(methods.klass, cache="dual", **_STABLE),
    "dawn_release": functools.partial(methods.dawn, "release", **_GRAPH),
    "dawn_dual": functools.partial(methods.dawn, cache="dual", **_GRAPH),
    "adablock": functools.partial(methods.adablock, **_DELIMITED),
    "adablock_dual": functools.partial(methods.adablock, cache="dual", **_DELIMITED),
    "entropy_bound": functools.partial(methods.entropy_bound, gamma=0.5),
    "d2cache": functools.partial(
        methods.d2cache, threshold=0.6, current_k=3, rollout_p=0.2, sigma=4, inflate_w=2, capacity=10
    ),
    "elastic_cache": functools.partial(elastic, threshold=0.6, gamma=0.97),
    "entropy_cache": functools.partial(methods.entropy_cache, threshold=0.6, max_entropy=1.0, recent=3),
    "dream": functools.partial(_whole, alg="entropy", alg_temp=0.5, top_k=7),
    "dream_random": functools.partial(_whole, alg="origin", temperature=0.8, top_p=0.9),
    "dream_threshold": functools.partial(_whole, alg="confidence_threshold", steps=4, threshold=0.6),
    "polestar": functools.partial(methods.polestar, update_threshold=1, **_GATE),
    "polestar_release": functools.partial(methods.polestar, "release", **_GATE),
    "dllm_cache": functools.partial(methods.dllm_cache, **_INTERVALS, threshold=0.6),
    "dynamic_dllm": functools.partial(methods.dynamic_dllm, **_INTERVALS, **_WINDOW, threshold=0.6),
    "dynamic_dllm_dynamics": functools.partial(
        methods.dynamic_dllm, "release", **_INTERVALS, **_WINDOW, select_from="inputs", dynamics="position", start=0.6
    ),
    "dkv_cache": functools.partial(methods.dkv_cache, interval=3, capacities=(0.5,), threshold=0.6),
    "dkv_cache_greedy": functools.partial(methods.dkv_cache_greedy, interval=3, window=2, steps=8),
    "sparse_dllm": functools.partial(methods.sparse_dllm, keep_ratio=0.4, threshold=0.6),
    "sparse_dllm_entry": functools.partial(methods.sparse_dllm, keep_ratio=0.4, first_token="entry", threshold=0.6),
}
# Numbers that make a method commit one token per forward, whatever the confidences: same program, other arguments.
ONE_PER_FORWARD = {
    "vanilla": {},
    "vanilla_temperature": {},
    "vanilla_guidance": {},
    "parallel": {"threshold": 2.0},
    "dual": {"threshold": 2.0},
    "prefix": {"threshold": 2.0},
    "dual_entry": {"threshold": 2.0},
    "prefix_instead": {"threshold": 2.0},
    "hierarchy": {"threshold": 2.0, "low_threshold": 2.0, "remask_threshold": -1.0},
    "localleap": {"threshold": 2.0},
    "prophet": {"early": 1e9, "mid": 1e9, "late": 1e9},
    "slowfast": {"threshold": 2.0},
    "dual_slowfast": {"threshold": 2.0},
    "d2cache_klass": {"tau_c": 2.0},
    "wino": {"threshold": 2.0},
    "dpad": {"threshold": 2.0},
    "freecache": {"threshold": 2.0},
    "klass": {"tau_c": 2.0},
    "klass_dual": {"tau_c": 2.0},
    "dawn_release": {"tau_high": 2.0, "tau_induce": 2.0, "tau_low": 2.0},
    "dawn_dual": {"tau_high": 2.0, "tau_induce": 2.0, "tau_low": 2.0},
    "adablock": {"threshold": 2.0},
    "adablock_dual": {"threshold": 2.0},
    "entropy_bound": {"gamma": -1.0},
    "d2cache": {"threshold": 2.0},
    "elastic_cache": {"threshold": 2.0},
    "entropy_cache": {"threshold": 2.0},
    "dream_threshold": {"threshold": 2.0},
    "polestar": {"tau": float("inf"), "suffix_tau": 2.0},
    "polestar_release": {"tau": float("inf"), "suffix_tau": 2.0},
    "dllm_cache": {"threshold": 2.0},
    "dynamic_dllm": {"threshold": 2.0},
    "dynamic_dllm_dynamics": {"start": 3.0},
    "dkv_cache": {"threshold": 2.0},
    "sparse_dllm": {"threshold": 2.0},
    "sparse_dllm_entry": {"threshold": 2.0},
}

# What a constructor calls a number, and another value of it than the table's: nothing may be compiled again for it.
_OTHER_GATE = {
    "tau": 0.5,
    "alpha": 3.0,
    "history": 2,
    "gate_floor": 0.25,
    "gate_ceiling": 8.0,
    "suffix_tau": 0.75,
    "selected": 2,
    "selected_last": 3,
    "update_threshold": 4,
    "step_threshold": 2,
    "window_entry_period": 3,
}
_OTHER_GRAPH = {"tau_high": 0.7, "tau_induce": 0.3, "tau_sink": 0.1, "tau_edge": 0.05, "tau_low": 0.2}
OTHER_NUMBERS = {
    "vanilla_temperature": {"temperature": 0.5},
    "vanilla_guidance": {"guidance": 0.5},
    "parallel": {"threshold": 0.4},
    "parallel_factor": {"factor": 0.7},
    "dual": {"threshold": 0.4},
    "prefix": {"threshold": 0.4},
    "dual_entry": {"threshold": 0.4},
    "prefix_instead": {"threshold": 0.4},
    "hierarchy": {"threshold": 0.8, "low_threshold": 0.3, "remask_threshold": 0.5},
    "localleap": {"threshold": 0.8, "relaxed": 0.2, "radius": 2},
    "dimple": {"threshold": 0.4},
    "prophet": {"early": 8.0, "mid": 1.0, "late": 0.5, "answer_start": 2, "answer_length": 5},
    "slowfast": {"floor": 0.1, "threshold": 0.4, "deviation": 0.5},
    "dual_slowfast": {"threshold": 0.4},
    "d2cache_klass": {"tau_c": 0.2},
    "wino": {"threshold": 0.4, "threshold_back": 0.7},
    "dpad": {"threshold": 0.4, "scale": 1.5, "decay": 2.0, "window": 6},
    "dpad_prefix": {"threshold": 0.4, "preserved": 1, "window": 5},
    "freecache": {"threshold": 0.4},
    "klass": {"tau_c": 0.5, "eps_kl": 0.1},
    "klass_dual": {"tau_c": 0.5, "eps_kl": 0.1},
    "dawn_release": _OTHER_GRAPH,
    "dawn_dual": _OTHER_GRAPH,
    "adablock": {"threshold": 0.4, "delimiter_threshold": 0.5},
    "adablock_dual": {"threshold": 0.4, "delimiter_threshold": 0.5},
    "entropy_bound": {"gamma": 1.0},
    "d2cache": {
        "threshold": 0.4,
        "current_k": 2,
        "rollout_p": 0.5,
        "sigma": 2,
        "inflate_w": 3,
    },
    "elastic_cache": {"threshold": 0.4, "gamma": 0.5, "boundary": 1},
    "entropy_cache": {"threshold": 0.4, "max_entropy": 2.0},
    "dream": {"alg_temp": 0.25},
    "dream_random": {"temperature": 0.5, "top_p": 0.5},
    "dream_threshold": {"threshold": 0.4},
    "polestar": _OTHER_GATE,
    "polestar_release": _OTHER_GATE,
    "dllm_cache": {"prompt_interval": 4, "response_interval": 2, "threshold": 0.4},
    "dynamic_dllm": {"prompt_interval": 4, "response_interval": 2, "budget": 3, "budget_scale": 20, "threshold": 0.4},
    "dynamic_dllm_dynamics": {"start": 0.5, "alpha": 0.02, "beta": 0.1},
    "dkv_cache": {"interval": 2, "threshold": 0.4},
    "dkv_cache_greedy": {"interval": 2},
    "sparse_dllm": {"threshold": 0.4},
    "sparse_dllm_entry": {"threshold": 0.4},
}

# Every row takes the same number of forwards.
SAME_LENGTH = {"dual_steps", "dkv_cache_greedy", "dream", "dream_random"}
# Rows that are all in the same kind of forward at the same time: nobody waits.
IN_STEP = SAME_LENGTH | {
    "d2cache",
    "d2cache_klass",
    "dllm_cache",
    "dynamic_dllm",
    "dynamic_dllm_dynamics",
    "elastic_cache",
    "freecache",
}

# The first-token habits need shifted logits. Dream's sampler has no cache that a shift could touch: one family will do.
DREAM_ONLY = {"dual_entry", "prefix_instead", "sparse_dllm_entry", "dream", "dream_random", "dream_threshold"}
# Rules and samplers look at positions, not at rows: what they do is the same for every family.
LLADA_ONLY = {"vanilla_random", "vanilla_temperature", "parallel_factor", "dual_steps"}
EXCLUDED = {"llada": DREAM_ONLY, "dream": LLADA_ONLY}

CASES = [(family, name) for family in FAMILIES for name in METHODS if name not in EXCLUDED[family]]


def lets_mask_win(decode) -> bool:
    """Whether [MASK] may be the prediction, as in the `release` preset: positions may then stay masked."""
    return getattr(decode.method.sampler, "allow_mask", False)


def case_fixture():
    """The fixture `case` of a module: family and method.

    Its scope is the module, so that all tests of a method follow one another and share its programs.
    """

    @pytest.fixture(scope="module", params=CASES, ids="-".join)
    def case(request) -> tuple[str, str]:
        return request.param

    return case


_SCALES = {"embedding": 50.0, "query": 1.5, "key": 1.5, "head": 5.0}


@functools.cache
def lively_params(model, seed: int):
    """Random parameters whose predictions depend on the context and whose confidences are of all sizes."""
    random = np.random.default_rng(seed)

    def scale(path, leaf):
        names = [str(getattr(key, "key", key)) for key in path]
        if names[-1] == "bias":
            return leaf + random.normal(0, 0.5, leaf.shape).astype(np.float32)
        return leaf * np.prod([_SCALES.get(name, 1.0) for name in names]).astype(np.float32)

    return jax.tree_util.tree_map_with_path(scale, model.init(jax.random.key(seed)))


@functools.cache
def decoder(family: str, name: str, gen_length: int = GEN_LENGTH, block_length: int = BLOCK_LENGTH, **numbers):
    """The decode of a method of the table."""
    method = METHODS[name](block_length=block_length, **numbers)
    return make_decode(FAMILIES[family], method, gen_length=gen_length)


def pad(prompts, length: int, garbage: int = 0) -> Prompt:
    """Left-pads prompts with ids that nobody may read, from inside and from outside the vocabulary."""
    tokens = np.random.default_rng(garbage).integers(-50, 1000, (len(prompts), length)).astype(np.int32)
    valid = np.zeros(tokens.shape, bool)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        valid[row, length - len(prompt) :] = True
    return Prompt(jnp.asarray(tokens), jnp.asarray(valid))


def prompts_of(config, lengths, seed: int) -> list[np.ndarray]:
    """Random prompts; those with room for it hold [MASK] and EOS."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, config.vocab_size, length) for length in lengths]
    for prompt in prompts:
        if len(prompt) > 3:
            prompt[1], prompt[-2] = config.mask_id, config.eos_id
    return prompts


LENGTHS = (1, 4, 9, 7)
ALONE, RAGGED = 9, 13  # prompt slots; the longest prompt has no pads alone, every prompt has some in the batch
KEYS = jax.random.split(jax.random.key(7), len(LENGTHS))


def ragged_prompts(family: str, seed: int = 0) -> list[np.ndarray]:
    return prompts_of(FAMILIES[family].config, LENGTHS, seed)


def decode_rows(
    family: str, name: str, rows, length: int, seed: int = 0, garbage: int = 0, params_seed: int = 1, shape=()
):
    """Decodes rows of the ragged scenario as one batch with their own keys; the output as NumPy arrays.

    Args:
      shape: G and S, unless they are those of the table.
    """
    decode, prompts = decoder(family, name, *shape), ragged_prompts(family, seed)
    params = lively_params(FAMILIES[family], params_seed)
    state = decode.init(KEYS[jnp.array(rows)], length)
    output, _ = decode(params, state, pad([prompts[row] for row in rows], length, garbage))
    return jax.tree.map(np.asarray, output)


decode_once = functools.cache(decode_rows)
"""`decode_rows`, remembered; rows as a tuple."""

EVERYONE = tuple(range(len(LENGTHS)))


def host(tree):
    """The tree in NumPy; random keys as their data."""
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda leaf: np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree)


def assert_same_tree(ours, theirs, atol: float = 0.0) -> None:
    """Integers exactly, floats within `atol`."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol if a.dtype.kind == "f" else 0, err_msg=str(path))
