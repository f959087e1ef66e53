"""What the compiled decode contains: each weight read in place, nothing that calls back to the host."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from models.transformer import Config, Transformer
from polestar_jax import hlo, make_decode, methods
from polestar_jax.aot import copied_weights
from polestar_jax.decode import lower_decode

# Sizes that no activation shares, so that a shape names a weight.
CONFIG = Config(
    family="llada",
    vocab_size=421,
    model_size=112,
    layers=3,
    heads=4,
    kv_heads=4,
    feed_forward=240,
    max_length=256,
    rope_theta=1e4,
    epsilon=1e-5,
    mask_id=420,
    eos_id=419,
)


def compile_text(method, config=CONFIG) -> str:
    decode = make_decode(Transformer(config), method, gen_length=32)
    return lower_decode(decode, decode.model.abstract_params(), prompt_length=20).compile().as_text()


@pytest.fixture(scope="module")
def polestar_text() -> str:
    return compile_text(methods.polestar(block_length=8))


def test_each_weight_is_read_in_place(polestar_text):
    program = hlo.parse(polestar_text)
    assert len(program.decode_branches()) == 4
    assert copied_weights(program, Transformer(CONFIG).abstract_params()) == []


def test_a_copied_weight_is_seen():
    """The check is worth something: stacked layers under `lax.scan` are sliced, and it says so."""
    weights = jax.ShapeDtypeStruct((3, 240, 112), jnp.float32)
    run = lambda x, stacked: jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight.T @ weight), None), x, stacked)[0]
    text = jax.jit(run).lower(jax.ShapeDtypeStruct((5, 112), jnp.float32), weights).compile().as_text()
    assert copied_weights(hlo.parse(text), Transformer(CONFIG).abstract_params())


def test_the_loop_holds_no_host_callback(polestar_text):
    opcodes = {each.opcode for computation in hlo.parse(polestar_text).computations.values() for each in computation}
    assert not opcodes & {"infeed", "outfeed", "send", "recv", "send-done", "recv-done"}
    assert "callback" not in polestar_text


def test_a_refresh_runs_more_than_a_step_and_less_than_two_entries(polestar_text):
    program = hlo.parse(polestar_text)
    step, refresh, _, full = map(program.kernels, program.decode_branches())
    assert step < refresh < 2 * full + step


def test_a_program_without_a_loop_is_refused():
    text = jax.jit(lambda x: x + 1).lower(1.0).compile().as_text()
    with pytest.raises(ValueError, match="no loop"):
        hlo.parse(text).decode_branches()


def test_copies_to_host_memory_are_no_kernels():
    """They are counted apart, and so are those that something is multiplied beside."""
    program = hlo.parse("""\
ENTRY %main (x.1: u8[96,256], y.1: f32[8,8]) -> (u8[96,256], u8[96,256], f32[8,8]) {
  %x.1 = u8[96,256]{1,0} parameter(0)
  %y.1 = f32[8,8]{1,0} parameter(1)
  %copy-start.1 = (u8[96,256]{1,0:S(5)}, u8[96,256]{1,0}, u32[]) copy-start(%x.1)
  %copy.2 = u8[96,256]{1,0} copy(%x.1)
  %copy-done.1 = u8[96,256]{1,0:S(5)} copy-done(%copy-start.1)
  %copy-start.2 = (u8[96,256]{1,0:S(5)}, u8[96,256]{1,0}, u32[]) copy-start(%copy.2)
  %dot.1 = f32[8,8]{1,0} dot(%y.1, %y.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %copy-done.2 = u8[96,256]{1,0:S(5)} copy-done(%copy-start.2)
  ROOT %tuple.1 = (u8[96,256]{1,0:S(5)}, u8[96,256]{1,0:S(5)}, f32[8,8]{1,0}) tuple(%copy-done.1, %copy-done.2, %dot.1)
}
""")
    assert (program.kernels(program.entry), program.transfers(program.entry)) == (2, 2)
    assert program.transfers_beside(program.entry) == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs uv sync --extra cuda13")
def test_plan_of_llada_8b_with_two_layers():
    """Compiled for an H200 in a process of its own: the CUDA plugin must not be loaded beside the other tests."""
    command = [sys.executable, "-m", "polestar_jax", "plan", "--layers", "2", "--gpu", "h200"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "120"}, check=True)
    assert "weights copied" in done.stdout and "none" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs uv sync --extra cuda13")
@pytest.mark.parametrize("model", ["llada-8b", "dream-7b"])
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_kernels_per_layer(model, gpu):
    """What two more layers add, compiled in processes of their own, as the CUDA plugin must not be loaded here."""
    plans = {}
    for layers in (2, 4):
        command = [sys.executable, "-m", "polestar_jax", "plan", "--model", model, "--gpu", gpu]
        command += ["--layers", str(layers), "--json", "-"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        plans[layers] = json.loads(done.stdout)["plan"]
        assert plans[layers]["copied_weights"] == []
    added = lambda kind: (plans[4]["kernels"][kind] - plans[2]["kernels"][kind]) / 2
    # LM head and bookkeeping are 1.5 more per layer of the whole models: 18 and 30 are what we promise.
    assert added("step") <= 16.5 and added("refresh") <= 28.5
