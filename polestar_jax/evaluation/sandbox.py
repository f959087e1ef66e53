"""Runs untrusted Python programs where they cannot hurt the host, and says whether they passed.

Every program gets a new process in new mount, process, network and IPC namespaces: an empty file system with the Python
installation read-only and one small writable folder, no network, no other process in sight, an unprivileged user and
hard limits. Linux only. Where namespaces cannot be made, nothing is run.
"""

import base64
import dataclasses
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_UNAVAILABLE = 97  # exit code of the launcher when it could not isolate, before any untrusted code
_SHOWN = 4096

Reason = Literal["passed", "failed", "timeout", "output"]


class SandboxUnavailable(OSError):
    """This machine cannot isolate untrusted programs."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
      seconds: of wall time, and of processor time per process.
      memory: bytes of address space per process.
      processes: alive at a time, threads included; memory is bounded by their product.
      disk: bytes of its writable folder.
      output: bytes that it may print.
    """

    seconds: float = 10.0
    memory: int = 2**30
    processes: int = 8
    disk: int = 2**24
    output: int = 2**20


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a program ended.

    Attributes:
      reason: "passed" only if the program ran to its last line; "failed" for an exception, an early exit or a signal.
      detail: the end of what it printed.
      seconds: wall time.
    """

    reason: Reason
    detail: str
    seconds: float

    @property
    def passed(self) -> bool:
        return self.reason == "passed"


def run_program(program: str, limits: Limits | None = None) -> Verdict:
    """Runs a Python program to its end.

    It passed if its last line was reached: `sys.exit(0)` before that is a failure. The proof is a random word that is
    written at the end; a program that searches its own interpreter for the word can forge it, and nothing else.

    Raises:
      SandboxUnavailable: namespaces cannot be made here. Nothing was run.
    """
    limits = limits or Limits()
    word = secrets.token_hex(16)
    request = {
        "program": base64.b64encode(program.encode("utf-8", "surrogatepass")).decode(),
        "word": word,
        "limits": dataclasses.asdict(limits),
    }
    proof_read, proof_write = os.pipe()
    began = time.monotonic()
    process = subprocess.Popen(
        [getattr(sys, "_base_executable", sys.executable), "-I", "-S", "-B", str(_LAUNCHER), str(proof_write)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(proof_write,),
        start_new_session=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": sys.base_prefix + "/lib"},
    )
    os.close(proof_write)
    try:
        printed, reason = _watch(process, json.dumps(request).encode(), began + limits.seconds, limits.output)
        os.set_blocking(proof_read, False)
        try:
            proof = os.read(proof_read, len(word) + 1)
        except BlockingIOError:
            proof = b""
    finally:
        os.close(proof_read)
    detail = printed[-_SHOWN:].decode(errors="replace")
    if process.returncode == _UNAVAILABLE:
        raise SandboxUnavailable(
            f"untrusted programs cannot be isolated here ({detail.strip()}): allow user namespaces"
            " (sysctl user.max_user_namespaces, or `docker run --privileged`), or score the saved answers on a machine"
            " that has them"
        )
    if reason is None:
        reason = "passed" if proof == word.encode() and process.returncode == 0 else "failed"
    return Verdict(reason, detail, time.monotonic() - began)


def _watch(process: subprocess.Popen, request: bytes, deadline: float, room: int) -> tuple[bytes, Reason | None]:
    """Feeds the launcher and reads until the end, the deadline or `room` bytes; kills everything in the end."""
    assert process.stdin is not None and process.stdout is not None
    printed, total, reason = b"", 0, None
    try:
        try:
            process.stdin.write(request)
            process.stdin.close()
        except BrokenPipeError:
            pass
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while reason is None:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    reason = "timeout"
                    break
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    break
                total += len(chunk)
                printed = (printed + chunk)[-_SHOWN:]
                if total > room:
                    reason = "output"
                elif time.monotonic() > deadline:
                    reason = "timeout"
        if reason is None:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                reason = "timeout"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    return printed, reason
