"""An interpreter that has imported what is slow to import, and forks the command each time it is asked to.

Run as a script of its own by the interpreter of the command, with that one's options; standard library only, apart
from what it is asked to import. ``template.py DESCRIPTOR JSON``: the descriptor is a socket to the launcher, the JSON
has ``launcher`` (its process number), ``preload``, ``kind``, ``name`` and ``arguments`` of the program. On the socket
it says ``{"ready": true}`` or ``{"cold": "why it cannot be used"}``, hears lines ``{"env": {…}}``, and each process
that it makes says ``{"pid": …}`` itself.

A fork copies the thread that makes it and no other, so it is of no use here once a module has started threads. Those of
OpenBLAS, which numpy starts, end before a fork by themselves.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import types
import warnings
from typing import Any

__all__ = ["main"]

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
NAME = b"fthsdp-template"
"""By which it is told from the processes that it makes, which have the same command line."""
LINGER = 0.5
"""Seconds in which threads that end at a fork may be gone from the process table."""

_libc = ctypes.CDLL(None, use_errno=True)


def _dies_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, or end now if that is so already."""
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _call_it(name: bytes) -> None:
    if sys.platform == "linux":
        _libc.prctl(PR_SET_NAME, name, 0, 0, 0)


def _tell(channel: socket.socket, **what: Any) -> None:
    channel.sendall(json.dumps(what).encode() + b"\n")


def _why_cold() -> str:
    """Why this process cannot be forked; empty when it can."""
    os.waitpid(_empty_fork(), 0)
    deadline = time.monotonic() + LINGER
    while (threads := len(os.listdir("/proc/self/task"))) > 1:
        if time.monotonic() > deadline:
            return f"what it has imported has started {threads - 1} threads"
        time.sleep(0.001)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "what it has imported has begun to use a GPU"
    return ""


def _empty_fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads, which is what we are here to find out
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    return pid


def _fork(channel: socket.socket, launcher: int) -> bool:
    """Make a process that is the launcher's child; return whether this is that process.

    It is made by one that ends at once, so that the launcher, which adopts orphans, becomes its parent.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(writer)
        if os.fork():
            os._exit(0)
        os.read(reader, 1)  # until we are the launcher's
        os.close(reader)
        _dies_with(launcher)
        _tell(channel, pid=os.getpid())
        return True
    os.close(reader)
    os.waitpid(between, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(writer, b"!")
    os.close(writer)
    return False


def _become(env: dict[str, str], arguments: list[str]) -> None:
    """Turn the copy into a process of its own."""
    _call_it(b"python")
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = arguments
    if "numpy.random" in sys.modules:  # Python's own generator sees to it by itself, and torch's has a fixed seed
        sys.modules["numpy.random"].seed()
    gc.unfreeze()


def _first_place(kind: str, name: str) -> list[str]:
    """Where the interpreter would look for modules first."""
    if sys.flags.safe_path:
        return []
    return [os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(name))]


def _preload(names: list[str]) -> str:
    """Import modules; return why that failed."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"import {name}: {type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    sys.stderr.flush()
    return ""


def _serve(channel: socket.socket, launcher: int) -> dict[str, str] | None:
    """Fork when asked; returns the environment in each process that was made, and None when the launcher is gone."""
    with channel, channel.makefile("rb") as lines:
        for line in lines:
            if _fork(channel, launcher):
                env: dict[str, str] = json.loads(line)["env"]
                return env
    return None


def _run(kind: str, name: str) -> None:
    """Run a program as the interpreter itself would: as ``__main__``, its exceptions and its exit being our own."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    if kind == "module":
        runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]
        return
    module.__dict__["__file__"] = os.path.abspath(name)
    with open(name, "rb") as file:
        code = compile(file.read(), name, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 (the script is the command of this container)


def main() -> None:
    """Import, wait, fork; what is forked returns from here when its program does."""
    channel, given = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    _dies_with(given["launcher"])
    _call_it(NAME)
    kind, name = given["kind"], given["name"]
    sys.path[0 : 0 if sys.flags.safe_path else 1] = _first_place(kind, name)
    why = _preload(given["preload"]) or _why_cold()
    if why:
        _tell(channel, cold=why)
        return
    _tell(channel, ready=True)
    env = _serve(channel, given["launcher"])
    if env is not None:
        _become(env, [name, *given["arguments"]])
        _run(kind, name)


if __name__ == "__main__":
    main()
