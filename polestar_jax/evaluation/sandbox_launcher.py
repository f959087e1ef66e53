"""Shuts itself in, then runs one untrusted program; started by `sandbox.run_program`, standard library only.

The order matters: namespaces, a root of its own, the unprivileged user, the limits, and only then the program.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import sys

_NOBODY = 65534
_UNAVAILABLE = 97
_ROOT = "/tmp"  # where the new root is put together: covered by a tmpfs that only this process sees
_WORK = "/work"
_SHARED = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _AT_RECURSIVE, _AT_FDCWD = 1, 2, 0x8000, -100
_MOUNT_SETATTR = 442  # the same number on every architecture
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_DRIVER = """
import base64, json, os, sys
request = json.load(sys.stdin)
proof = int(sys.argv[1])
sys.argv = ["program"]
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
program = compile(base64.b64decode(request.pop("program")).decode("utf-8", "surrogatepass"), "program.py", "exec")
word = request["word"].encode()
exec(program, {"__name__": "__main__", "__builtins__": __builtins__})
sys.stdout.flush()
os.write(proof, word)
"""

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encode = lambda text: None if text is None else text.encode()
    _check(
        _libc.mount(encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(options)),
        f"mounting {target}",
    )


def _make_read_only(target: str) -> None:
    # mount(2) would have to repeat every flag that is locked in a user namespace; this call only adds some.
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, ctypes.sizeof(attributes)
    )
    _check(result, f"making {target} read-only")


def enter_namespaces() -> None:
    """New mount, process, network, IPC and host-name namespaces; a user namespace too where they need one."""
    flags = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    user, group = os.getuid(), os.getgid()
    if user == 0:
        try:
            os.unshare(flags)
            return
        except OSError:  # root without its capabilities, as in a container
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            user = group = _NOBODY
    os.unshare(flags | os.CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_NOBODY} {user} 1"),
        ("gid_map", f"{_NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter_root(disk: int) -> None:
    """A file system with the Python installation, read-only, and one writable folder of `disk` bytes."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    shared = dict.fromkeys(path for path in (*_SHARED, sys.base_prefix) if os.path.exists(path))
    # Opened before /tmp is covered, so that a Python that lives in /tmp can still be reached.
    handles = {path: os.open(path, os.O_PATH) for path in shared}
    _mount("tmpfs", _ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    for path, handle in handles.items():
        if any(path.startswith(other + "/") for other in shared):
            continue
        target = _ROOT + path
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "w").close()
        _mount(f"/proc/self/fd/{handle}", target, None, _MS_BIND | _MS_REC)
    for handle in handles.values():
        os.close(handle)
    os.makedirs(_ROOT + _WORK)
    _make_read_only(_ROOT)
    _mount("tmpfs", _ROOT + _WORK, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=777,size={disk}")
    os.chroot(_ROOT)
    os.chdir(_WORK)


def set_limits(limits: dict) -> None:
    seconds = int(limits["seconds"]) + 1
    for name, value in (
        ("RLIMIT_CPU", seconds),
        ("RLIMIT_AS", limits["memory"]),
        ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_FSIZE", limits["disk"]),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_CORE", 0),
    ):
        resource.setrlimit(getattr(resource, name), (value, value))


def become_nobody() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges")
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "dying with the launcher")


def main() -> int:
    if platform.system() != "Linux":
        print("it needs Linux")
        return _UNAVAILABLE
    text = sys.stdin.buffer.read()
    limits = json.loads(text)["limits"]
    proof = int(sys.argv[1])
    try:
        enter_namespaces()
        enter_root(limits["disk"])
    except OSError as error:
        print(error)
        return _UNAVAILABLE
    # The first process of the new process namespace: when it ends, the kernel ends all others in there.
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) & 0xFF
    become_nobody()
    set_limits(limits)
    # A pipe holds 64 KiB, a program may be longer: it waits in a file that is gone before the program begins.
    with open("request", "w+b") as file:
        file.write(text)
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.unlink("request")
    os.set_inheritable(proof, True)
    environment = {"HOME": _WORK, "TMPDIR": _WORK, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    environment["LD_LIBRARY_PATH"] = sys.base_prefix + "/lib"
    python = os.path.realpath(sys.executable)
    os.execve(python, [python, "-I", "-B", "-c", _DRIVER, str(proof)], environment)


if __name__ == "__main__":
    sys.exit(main())
