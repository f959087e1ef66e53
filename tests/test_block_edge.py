"""Where rows predict the next position, every position of a block is predicted as by a forward without a cache.

The row before the block predicts its first position: at a block's entry, and in forwards right after it, when nothing
was committed and so nothing that is cached is stale.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods_table import FAMILIES, KEYS, LENGTHS, RAGGED, decoder, lively_params, pad, ragged_prompts

from models.transformer import Transformer
from polestar_jax.prompts import check_prompt, new_canvas

MODEL, PARAMS = FAMILIES["dream"], lively_params(FAMILIES["dream"], 1)
BATCH = len(LENGTHS)
call = jax.jit(Transformer.__call__, static_argnums=0)


def canvas_at(spec, index: int):
    """The ragged prompts with every block before `index` filled and half of its own."""
    canvas = new_canvas(spec, check_prompt(spec, pad(ragged_prompts("dream"), RAGGED)))
    random = np.random.default_rng(index)
    filled = np.arange(spec.length) < spec.prompt_length + index * spec.span
    filled = (filled | (random.random((BATCH, spec.length)) < 0.3)) & np.asarray(canvas.masked)
    tokens = np.where(filled, random.integers(0, MODEL.config.mask_id, filled.shape), canvas.tokens)
    return dataclasses.replace(
        canvas, tokens=jnp.asarray(tokens, jnp.int32), masked=canvas.masked & ~jnp.asarray(filled)
    )


def expected_logits(canvas):
    """The model itself on every row without its pads: by batch row and slot, the logits that predict the slot."""
    found = {}
    for row, length in enumerate(LENGTHS):
        pads = RAGGED - length
        logits = call(MODEL, PARAMS, canvas.tokens[row : row + 1, pads:])[0]
        found |= {(row, pads + place + 1): np.asarray(logits[place]) for place in range(len(logits))}
    return found


def decoder_of(name: str):
    """Polestar's window uncoded: what a code loses, a refresh would bring into the block."""
    return decoder("dream", name, **({"format": "none"} if name == "polestar" else {}))


@functools.cache
def compiled(name: str):
    """The kinds of forward of a method's policy, by name, compiled once for every block."""
    decode = decoder_of(name)
    return {branch.name: jax.jit(branch.run) for branch in decode.method.cache.branches(decode.spec(BATCH, RAGGED))}


@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize("name", ["dual", "prefix", "dual_entry", "prefix_instead", "polestar"])
def test_block_edge(name, index):
    decode = decoder_of(name)
    spec, policy, schedule = decode.spec(BATCH, RAGGED), decode.method.cache, decode.method.schedule
    canvas = canvas_at(spec, index)
    blocks = dataclasses.replace(schedule.init(spec), index=jnp.full(BATCH, index, jnp.int32))
    scope = schedule.scope(spec, blocks, canvas, KEYS)
    branches, everyone = compiled(name), jnp.ones(BATCH, bool)
    entry = branches["full entry" if name == "polestar" else "entry"]
    passes = {"entry": entry(PARAMS, policy.init(spec), canvas, scope, everyone)}
    for later in ("step", "refresh"):
        if later in branches:
            passes[later] = branches[later](PARAMS, passes["entry"].cache, canvas, scope, everyone)
    expected, start = expected_logits(canvas), int(scope.start[0])
    for kind, done in passes.items():
        logits, slot = np.asarray(MODEL.logits(PARAMS, done.hidden)), np.asarray(done.slot) + MODEL.shift
        first = start + (kind == "step" and name == "dual_entry")  # the habit: nobody predicts it again
        for row in range(BATCH):
            predicted = [q for q, valid in zip(slot[row], done.valid[row], strict=True) if valid]
            for position in range(first, start + spec.span):
                assert predicted.count(position) == 1, (kind, position)
            for place, position in enumerate(slot[row]):
                if done.valid[row, place] and position < spec.length:
                    np.testing.assert_allclose(
                        logits[row, place], expected[row, position], atol=1e-4, err_msg=f"{kind} {row} {position}"
                    )
