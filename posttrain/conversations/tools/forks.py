"""Worker processes that are forked from one parent: they start in milliseconds, and can be killed and replaced.

    parent = ForkServer(serve)          # now: everything that this process has imported and made is in it
    worker = parent.start()             # a process that runs serve(channel)
    worker.channel.send(...)
    parent.end(worker)                  # kills it with whatever it started; says how it ended

The parent is forked once, before a model is loaded, and does nothing but fork. Forking from the trainer each time would
copy the page tables of its weights, and the locks that its threads hold at that moment.
Functions of closures and notebooks, which cannot be pickled, are in the parent's memory like anything else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from posttrain.rewards.channel import Channel

_REQUEST = struct.Struct("!cq")
_REPLY = struct.Struct("!q")
_SEND_S = 60.0
_OURS: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # the trainer's ends of all connections
_GRACE_S = 2.0  # for workers to end by themselves when the parent ends


@dataclass(eq=False)
class Worker:
    """A worker as its user sees it."""

    pid: int
    channel: Channel


class ForkServer:
    """The parent of all workers. Thread-safe; `close` ends it and them, and so does the end of this process."""

    def __init__(self, serve: Callable[[Channel], None], prepare: Callable[[], None] | None = None) -> None:
        """`prepare` runs in the parent alone: what it imports is in all workers, and not in the trainer."""
        for stream in (sys.stdout, sys.stderr):  # what is buffered would be written once more by the child
            with contextlib.suppress(Exception):
                stream.flush()
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        _OURS.add(self._control)
        self.pid = os.fork()
        if self.pid == 0:
            # A parent would never read the end of what it, or the parent of other workers, holds open itself.
            for one in list(_OURS):
                one.close()
            _run(lambda: _serve_forks(theirs, serve, prepare))
        theirs.close()

    def start(self) -> Worker:
        """Forks a worker; RuntimeError if the parent is gone."""
        ours, theirs = socket.socketpair()
        _OURS.add(ours)
        with self._lock, theirs:
            try:
                socket.send_fds(self._control, [_REQUEST.pack(b"F", 0)], [theirs.fileno()])
                pid = self._reply()
            except OSError as error:
                ours.close()
                raise RuntimeError("the process that starts tool workers has ended") from error
        return Worker(pid, Channel(ours, send_s=_SEND_S))

    def end(self, worker: Worker) -> str:
        """Kills a worker's process group, if it still runs, and says how it ended: `exit code 3`."""
        worker.channel.close()
        with self._lock:
            try:
                self._control.sendall(_REQUEST.pack(b"K", worker.pid))
                return _describe(self._reply())
            except OSError:
                return "its parent has ended"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # the parent reads the end of the file
        self._control.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _reply(self) -> int:
        data = b""
        while len(data) < _REPLY.size:
            more = self._control.recv(_REPLY.size - len(data))
            if not more:
                raise OSError("closed")
            data += more
        return _REPLY.unpack(data)[0]


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _run(work: Callable[[], None]) -> None:
    """All that a forked process does. Nothing of the process that it came from may run again in it: no `finally`, no
    exit handler, no flushing of its files."""
    try:
        # A session of its own: Ctrl-C is for the run, and the whole group can be killed.
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        work()
    finally:
        os._exit(0)


def _serve_forks(control: socket.socket, serve: Callable[[Channel], None], prepare: Callable[[], None] | None) -> None:
    if prepare is not None:
        prepare()
    gc.freeze()  # a collection in a worker would copy every page that it looks at
    alive = set[int]()
    while True:
        data, fds, _, _ = socket.recv_fds(control, _REQUEST.size, 1)
        if len(data) < _REQUEST.size:  # the trainer has closed its end, or is gone
            break
        kind, pid = _REQUEST.unpack(data)
        if kind == b"F":
            pid = os.fork()
            if pid == 0:
                control.close()
                channel = Channel(socket.socket(fileno=fds[0]))
                _run(partial(serve, channel))
            os.close(fds[0])
            alive.add(pid)
            control.sendall(_REPLY.pack(pid))
        else:
            alive.discard(pid)
            control.sendall(_REPLY.pack(_kill(pid)))
    end = time.monotonic() + _GRACE_S  # workers see that their channels have ended
    while alive and time.monotonic() < end:
        alive = {pid for pid in alive if os.waitpid(pid, os.WNOHANG)[0] == 0}
        time.sleep(0.01)
    for pid in alive:
        _kill(pid)


def _kill(pid: int) -> int:
    """The status of a worker, which may have ended before; what it started ends with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    # The kill may come before the worker has made its group.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]
