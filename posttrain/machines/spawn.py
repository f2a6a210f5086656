"""Starts a Python process that imports the same posttrain and runs one of its functions, connected to this process.

The function finds the connection with `connection()`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def spawn(code: str, child_end: socket.socket, *, hash_seed: str = "0") -> subprocess.Popen[bytes]:
    """A process in a session of its own that runs this line of code; `child_end` is its end of the connection."""
    # The child imports this process's posttrain, whatever PYTHONPATH says: both ends must use the same protocol.
    # Everything else is imported as the user has it.
    start = f"import sys; sys.path.insert(0, {_ROOT!r}); import posttrain; del sys.path[0]; {code}"
    # A plain subprocess, not multiprocessing: the user's __main__ is never imported a second time. -P keeps the working
    # folder out of the child's own imports, where a user's random.py would shadow the standard library.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", start, str(child_end.fileno()), str(os.getpid())],
        pass_fds=[child_end.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # output that bypasses sys.stdout (C code, children) must not mix with the run's own output
        env=_environment(hash_seed),
        start_new_session=True,
    )


def connection() -> socket.socket:
    """In a process that `spawn` has started: its connection. From here on the process ends with its parent."""
    number, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with_parent(True)
    if os.getppid() != parent:  # it ended before the call
        os._exit(0)
    os.set_inheritable(number, False)  # a program that outlives this process must not keep its connection open
    return socket.socket(fileno=number)


def end_with_parent(on: bool) -> None:
    """Whether the kernel kills this process when its parent ends, however that happens; only Linux does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL if on else 0)


def _environment(hash_seed: str) -> dict[str, str]:
    environment = dict(os.environ)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *([] if _ROOT in paths else [_ROOT])])
    # Equal hash seeds give sets the same order in every worker, so a result cannot depend on which one computed it.
    environment.update(
        {"PYTHONHASHSEED": hash_seed, "TOKENIZERS_PARALLELISM": "false"}, **dict.fromkeys(_ONE_THREAD, "1")
    )
    return environment
