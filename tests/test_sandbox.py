"""The scorer of generated code survives what it is given, and says what happened."""

import os
import selectors
import socket
import subprocess
import threading
import time

import pytest

from polestar_jax.evaluation import sandbox
from polestar_jax.evaluation.sandbox import Limits, SandboxUnavailable, run_program

SHORT = Limits(seconds=3)


@pytest.fixture(scope="module", autouse=True)
def _isolation():
    try:
        run_program("")
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def test_a_program_that_reaches_its_end_passes():
    verdict = run_program("print('seen')\nassert sorted([2, 1]) == [1, 2]")
    assert verdict.passed
    assert verdict.detail == "seen\n"


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("import sys; sys.exit(0)\nassert False", ""),
        ("import os; os._exit(0)\nassert False", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV); os.abort()", ""),
        ("x = (", "SyntaxError"),
        ("bytearray(10 * 2**30)", "MemoryError"),
        ("open('/tmp/written', 'w')", "No such file"),
        ("open('/usr/written', 'w')", "Read-only"),
        ("open('/written', 'w')", "Read-only"),
        ("open('large', 'wb').write(bytes(2**26))", "File too large"),
        ("for i in range(9):\n    open(str(i), 'wb').write(bytes(2**23))", "No space left"),
        ("open('/proc/1/environ')", "No such file"),
        ("import os; os.unshare(os.CLONE_NEWUSER)", "not permitted"),
        ("import os; os.kill(-1, 9)", ""),
        ("\udc80", "encode"),
    ],
)
def test_a_program_that_does_not_fails(program, detail):
    verdict = run_program(program, SHORT)
    assert verdict.reason == "failed", verdict
    assert detail in verdict.detail


def test_an_infinite_loop_is_stopped():
    began = time.monotonic()
    assert run_program("while True: pass", Limits(seconds=1)).reason == "timeout"
    assert time.monotonic() - began < 4


def test_sleeping_is_no_way_around_the_clock():
    assert run_program("import time; time.sleep(60)", Limits(seconds=1)).reason == "timeout"


def test_a_fork_bomb_is_contained_and_gone_afterwards():
    before = len(_processes())
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    assert run_program(bomb, Limits(seconds=2, processes=6)).reason == "timeout"
    count = run_program(
        "import os\nalive = 1\ntry:\n    while os.fork():\n        alive += 1\n    import time; time.sleep(9)\n"
        "except OSError:\n    assert alive <= 6, alive",
        Limits(seconds=5, processes=6),
    )
    assert count.passed, count
    time.sleep(0.2)
    assert len(_processes()) < before + 6


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def test_a_hundred_megabytes_of_output_are_cut():
    assert run_program("print('x' * 100 * 2**20)", SHORT).reason == "output"


def test_secrets_of_the_environment_are_not_there(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "not-for-you")
    verdict = run_program("import os; print(os.environ); assert 'SECRET_TOKEN' not in os.environ")
    assert verdict.passed, verdict
    assert "not-for-you" not in verdict.detail


def test_no_socket_reaches_anything():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        thread = threading.Thread(target=lambda: socket.create_connection(("127.0.0.1", port), 2).close())
        thread.start()
        server.accept()[0].close()  # the host itself does reach it
        thread.join()
        verdict = run_program(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)", SHORT)
    assert verdict.reason == "failed"
    assert "unreachable" in verdict.detail or "refused" in verdict.detail


def test_programs_do_not_see_one_another():
    assert run_program("open('left', 'w').write('behind')").passed
    assert run_program("import os; assert os.listdir('.') == []").passed


def test_long_programs_and_programs_that_read_input():
    assert run_program("x = 1\n" * 100_000).passed
    assert run_program("assert input.__name__\ntry:\n    input()\nexcept EOFError:\n    pass").passed


def test_without_namespaces_nothing_is_run(monkeypatch, tmp_path):
    launcher = tmp_path / "launcher.py"
    launcher.write_text("import sys; sys.stdin.read(); print('unshare: not permitted'); sys.exit(97)")
    monkeypatch.setattr(sandbox, "_LAUNCHER", launcher)
    with pytest.raises(SandboxUnavailable, match=r"unshare: not permitted.*user\.max_user_namespaces"):
        run_program("x = 1")


def test_an_interrupted_run_leaves_no_process(monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    started, popen = [], subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(selectors.DefaultSelector, "select", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_program("print('x')\nimport time; time.sleep(60)")
    assert started[0].poll() is not None
