"""Compiles a whole bf16 decode for a GPU, on this machine and without a GPU, and prints its memory plan.

Needs jax's CUDA wheels: uv sync --extra cuda13.

examples:
  polestar plan --model llada-8b --gpu h200 --method polestar --prompt-length 1024 --gen-length 256
"""

import argparse
import dataclasses
import os

from polestar_jax.commands.options import add_json
from polestar_jax.commands.output import check_target, make_consoles, write_json

SUMMARY = "compile a decode for a GPU without one, and print its memory plan"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llada-8b", metavar="NAME", help="or dream-7b (default: %(default)s)")
    parser.add_argument("--gpu", default="h200", help="a100, h100, h200 or l4 (default: %(default)s)")
    parser.add_argument(
        "--method", default="polestar", metavar="NAME[:PRESET][:FIELD=VALUE...]", help="(default: %(default)s)"
    )
    for name, value in (("--prompt-length", 1024), ("--gen-length", 256), ("--block-length", 32), ("--batch", 1)):
        parser.add_argument(name, type=int, default=value, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--kernels", choices=("xla", "mosaic", "triton"), help="(default: the best that the GPU runs)")
    parser.add_argument("--layers", type=int, metavar="L", help="fewer layers than the model has, for a quick look")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    check_target("--json", arguments.json)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no device is touched, not even one that is there
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA complains of any compilation over two minutes
    from rich.table import Table

    from models.published import PUBLISHED
    from polestar_jax import make_decode
    from polestar_jax.analysis.costs import CEILINGS, forward_work, host_bytes
    from polestar_jax.aot import check_toolchain, compile_plan
    from polestar_jax.commands.method_arguments import parse_method
    from polestar_jax.environment import describe_environment, format_environment

    if arguments.model not in PUBLISHED:
        raise ValueError(f"--model {arguments.model!r} must be one of {', '.join(PUBLISHED)}")
    check_toolchain()
    console, notes = make_consoles(arguments.json)
    model = PUBLISHED[arguments.model]
    if arguments.layers is not None:
        model = dataclasses.replace(model, config=dataclasses.replace(model.config, layers=arguments.layers))
    choice = parse_method(arguments.method)
    method = choice.build(arguments.block_length)
    decode = make_decode(model, method, gen_length=arguments.gen_length, kernels=arguments.kernels)
    with notes.status(f"compiling {arguments.model} with {choice.label} for {arguments.gpu} (a minute or two)"):
        plan = compile_plan(decode, arguments.gpu, arguments.prompt_length, arguments.batch)
    shapes = (model, method, arguments.prompt_length, arguments.gen_length)
    work = forward_work(*shapes) if arguments.batch == 1 else {}
    state_on_host, ceiling = arguments.batch * host_bytes(*shapes), CEILINGS[plan.gpu]
    sizes = (
        f"P {arguments.prompt_length}, G {arguments.gen_length}, S {arguments.block_length}, batch {arguments.batch}"
    )
    table = Table(title=f"{arguments.model}, bf16, {choice.label} on {plan.gpu}: {sizes}", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name in ("weights", "state", "temporaries", "unaliased", "total"):
        table.add_row(name, f"{getattr(plan, name) / 1e9:.2f} GB", end_section=name in ("unaliased", "total"))
    table.add_row("host memory", f"{plan.host / 1e6:.2f} MB ({state_on_host / 1e6:.2f} by shapes)")
    for kind, count in plan.kernels.items():
        table.add_row(f"kernels, {kind}", f"{count} ({count / plan.layers:.1f} per layer)")
    for kind, count in plan.transfers.items():
        if count:
            table.add_row(f"copies to and from the host, {kind}", f"{count}, {plan.beside[kind]} beside other work")
    table.add_row("weights copied", ", ".join(plan.copied_weights) or "none", end_section=True)
    if work:
        rates = f"{ceiling.bandwidth / 1e12:.2f} TB/s and {ceiling.operations / 1e12:.0f} TFLOP/s"
        table.add_row("least work of a forward, by shapes", f"at {rates}")
    for kind, each in work.items():
        cells = f"{each.bytes / 1e9:.2f} GB, {each.operations / 1e12:.2f} TFLOP"
        table.add_row(f"  {kind}: {cells}", f"{1e3 * each.seconds(ceiling):.2f} ms", end_section=kind == list(work)[-1])
    table.add_row("lowering, compiling", f"{plan.lower_seconds:.0f} s, {plan.compile_seconds:.0f} s")
    console.print(table)
    environment = describe_environment(dtype=model.config.dtype, command=arguments.words)
    console.print(format_environment(environment))
    least = {kind: each._asdict() | {"seconds": each.seconds(ceiling)} for kind, each in work.items()}
    results = {"plan": dataclasses.asdict(plan), "least": least, "state_on_host": state_on_host}
    write_json(arguments.json, {"environment": environment} | results)
