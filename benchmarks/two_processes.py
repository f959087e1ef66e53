"""Decodes over a mesh that spans two processes, and compares it with one process: what several hosts would run.

    python benchmarks/two_processes.py

Starts two processes on this host that find each other by `jax.distributed`, each with two virtual CPU devices; the
four devices are a mesh (data 2, model 2), so that the batch is split between the processes and each layer inside of
one. `--across` turns it, so that every layer's sums cross from process to process. Nothing in it but the addresses is
particular to one host or to CPUs.
"""

import argparse
import os
import socket
import subprocess
import sys
import time

PROCESSES, DEVICES = 2, 2
METHODS = ("vanilla", "fast_dllm", "polestar")
GEN_LENGTH, BLOCK_LENGTH = 16, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="polestar-tiny", help="name or folder (default: %(default)s)")
    parser.add_argument("--methods", default=",".join(METHODS), help="default: %(default)s")
    parser.add_argument("--across", action="store_true", help="split layers, not the batch, between the processes")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process is None:
        sys.exit(start_both())
    decode_here(arguments)


def start_both() -> int:
    """Starts both processes with this one's arguments; 0 if both end well."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    words = [sys.executable, *sys.argv, f"--port={port}"]
    running = [subprocess.Popen([*words, f"--process={number}"], env=environment) for number in range(PROCESSES)]
    while any(process.poll() is None for process in running):
        if any(process.poll() for process in running):  # the other would wait for it
            for process in running:
                process.terminate()
        time.sleep(0.1)
    return max(abs(process.returncode) for process in running)


def decode_here(arguments: argparse.Namespace) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{arguments.port}", PROCESSES, arguments.process)
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh

    from polestar_jax import load, make_decode, methods, pad_prompts

    devices = np.array(jax.devices()).reshape(PROCESSES, DEVICES)  # a row is a process
    mesh = Mesh(devices.T if arguments.across else devices, ("data", "model"))
    model, params, _ = load(arguments.model, mesh=mesh)
    _, alone, _ = load(arguments.model)
    random = np.random.default_rng(0)
    prompts = pad_prompts([random.integers(3, 60, length).tolist() for length in (5, 12, 9, 7)])
    keys = jax.random.split(jax.random.key(0), 4)
    for name in arguments.methods.split(","):
        decode = make_decode(model, getattr(methods, name)(block_length=BLOCK_LENGTH), gen_length=GEN_LENGTH)
        length = prompts.tokens.shape[1]
        output, _ = decode(params, decode.init(keys, length, mesh=mesh), prompts)
        everyone = multihost_utils.process_allgather((output.tokens, output.forwards), tiled=True)
        single, _ = decode(alone, decode.init(keys, length), prompts)
        np.testing.assert_array_equal(everyone[0], single.tokens)
        np.testing.assert_array_equal(everyone[1], single.forwards)
        if arguments.process == 0:
            count, forwards = everyone[0].size, everyone[1].tolist()
            print(f"{name}: {count} tokens in {forwards} forwards, as in one process", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
