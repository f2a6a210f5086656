"""The process that outlives a run by a moment, to end what its reward workers have started.

The kernel kills a worker when the trainer dies, but not the programs that a reward function has started: nobody is
left who knows them. The guardian does: it is told every worker's process group over a pipe, and when the pipe closes,
however the trainer ended, it kills the groups that were not taken back. A program that leaves its group (by setsid)
escapes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

_CODE = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    group = int(line[1:])
    (groups.add if line[0] == "+" else groups.discard)(group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""

_lock = threading.Lock()
_owner: int | None = None
_pipe: int | None = None


def watch(group: int) -> None:
    """Have this process group ended when this process ends."""
    _tell(f"+{group}\n")


def forget(group: int) -> None:
    """It was ended already, and its number may be given to others."""
    _tell(f"-{group}\n")


def _tell(line: str) -> None:
    global _owner, _pipe
    with _lock:
        if _pipe is None or _owner != os.getpid():  # a forked child has workers, and a guardian, of its own
            _pipe, _owner = _start(), os.getpid()
        # Without it (it was killed, too) the kernel still ends the workers themselves.
        with contextlib.suppress(OSError):
            os.write(_pipe, line.encode())


def _start() -> int:
    theirs, ours = os.pipe()  # neither end is inherited by other children: the trainer alone keeps the pipe open
    try:
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the run
        )
    finally:
        os.close(theirs)
    return ours
