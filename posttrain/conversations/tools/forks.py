"""Worker processes that are forked from one parent: they start in milliseconds, and can be killed and replaced.

    parent = ForkServer(serve)          # now: everything that this process has imported and made is in it
    worker = parent.start()             # a process that runs serve(channel, marks)
    worker.channel.send(...)
    worker.kill()                       # with whatever it started
    worker.ended().text                 # how it ended

The parent does nothing but fork. It is forked before a model is loaded: forking from the trainer each time would copy
the page tables of its weights, and the locks that its threads hold at that moment. If it is killed from outside, its
workers end with it, and it gets a successor: the trainer forks a keeper once, from which all parents are forked.
Functions of closures and notebooks, which cannot be pickled, are in the parent's memory like anything else. On other
machines there is no trainer to fork from: there the parent is a Python of its own (`spawned`).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from typing import cast

from posttrain.conversations.tools.marks import Marks
from posttrain.errors import UserError, first_line
from posttrain.machines.channel import SEND_S, Channel
from posttrain.machines.host import End
from posttrain.machines.spawn import connection, end_with_parent, spawn

_REQUEST = struct.Struct("!cq")
_REPLY = struct.Struct("!q")
_OURS: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # the trainer's ends of all connections
_GRACE_S = 2.0  # for workers to end by themselves when the parent ends
MAKE_S = 100.0  # for a parent on another machine to make what its workers serve; less than the driver waits for it


Serve = Callable[[Channel, Marks], None]
"""All that a worker does. It may mark the conversations whose code runs, so that they are known after its end."""


class Worker:
    """A worker as its user sees it."""

    machine = None  # this one

    def __init__(self, parent: Parent, pid: int, channel: Channel) -> None:
        self._parent, self.pid, self.channel = parent, pid, channel
        self._end: End | None = None

    def stop(self) -> bool:
        """Kills its process group, if it still runs. Always True: how it ended is known."""
        if self._end is None:
            self._end = self._parent.end(self.pid)
        return True

    def ended(self) -> End:
        self.stop()
        return cast(End, self._end)

    def kill(self) -> None:
        self.channel.close()
        self.stop()


class ParentEnded(RuntimeError):
    """No further workers come from this parent."""

    def __init__(self) -> None:
        super().__init__("the process that starts workers has ended")


class Parent:
    """A process that forks workers, by its control connection. Thread-safe; `close` ends it and them."""

    def __init__(self, pid: int, control: socket.socket, wait: Callable[[], object] = lambda: None) -> None:
        """`wait` returns when the process has ended."""
        self.pid, self._control, self._wait = pid, control, wait
        self._lock = threading.Lock()
        _OURS.add(control)

    def start(self) -> Worker:
        """Forks a worker. ParentEnded if the parent is gone; RuntimeError if the machine starts no more processes."""
        ours, theirs = socket.socketpair()
        _OURS.add(ours)
        with self._lock, theirs:
            try:
                socket.send_fds(self._control, [_REQUEST.pack(b"F", 0)], [theirs.fileno()])
                pid = self._read_number()
            except OSError as error:
                ours.close()
                self._control.close()  # what it may still answer is no answer to the next request
                raise ParentEnded from error
        if pid < 0:
            ours.close()
            raise RuntimeError(f"this machine starts no more processes ({os.strerror(-pid)})")
        return Worker(self, pid, Channel(ours, send_s=SEND_S))

    def end(self, pid: int) -> End:
        """Kills a worker's process group, if it still runs, and says how it ended."""
        with self._lock:
            try:
                self._control.sendall(_REQUEST.pack(b"K", pid))
                status, marked = self._read_number(), self._read_number()
                running = frozenset(self._read_number() for _ in range(marked))
            except OSError:
                self._control.close()
                return End("with the process that had started it", killed=True, running=None)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return End(_describe(status), killed, running)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # the parent reads the end of the file
        self._control.close()
        with contextlib.suppress(ChildProcessError):
            self._wait()

    def _read_number(self) -> int:
        data = b""
        while len(data) < _REPLY.size:
            more = self._control.recv(_REPLY.size - len(data))
            if not more:
                raise OSError("closed")
            data += more
        return _REPLY.unpack(data)[0]


class ForkServer:
    """Starts workers, by a parent that is replaced where it is lost. Thread-safe; `close` ends all processes, and so
    does the end of this one."""

    def __init__(self, serve: Serve, prepare: Callable[[], None] | None = None) -> None:
        """`prepare` runs in the keeper alone: what it imports is in all workers, and not in the trainer."""
        for stream in (sys.stdout, sys.stderr):  # what is buffered would be written once more by the child
            with contextlib.suppress(Exception):
                stream.flush()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            # A keeper would never read the end of what it, or the keeper of other workers, holds open itself.
            for one in [ours, *_OURS]:
                one.close()
            _run(lambda: _keep_parents(theirs, serve, prepare))
        theirs.close()
        self._keeper = Parent(pid, ours, partial(os.waitpid, pid, 0))
        self._lock = threading.Lock()
        self._as_worker: Worker | None = None  # the parent as the keeper's worker
        self._parent: Parent | None = None
        self._is_lost = False

    def start(self) -> Worker:
        """Forks a worker. RuntimeError if that cannot be done."""
        with self._lock:
            if self._parent is not None:
                with contextlib.suppress(ParentEnded):
                    return self._parent.start()
            return self._replace_parent().start()

    def _replace_parent(self) -> Parent:
        if self._as_worker is not None:
            self._as_worker.kill()  # it may be stopped
        try:
            self._as_worker = self._keeper.start()
        except ParentEnded:
            self._is_lost = True
            raise
        # Its socket has a deadline: one that is stopped is replaced, too.
        self._parent = Parent(self._as_worker.pid, self._as_worker.channel.socket)
        return self._parent

    def check(self, what: str) -> None:
        """UserError where no workers can be started any more. `what` runs in them."""
        if self._is_lost:
            raise UserError(
                f"{what} cannot run any more: the process that starts their worker processes was killed from outside, "
                "and so was the one that starts its successors.\n"
                "  to do:  see who killed them (`dmesg` shows it if memory was short), and start the run again: it "
                "continues from its last checkpoint"
            )

    def close(self) -> None:
        if self._parent is not None:
            self._parent.close()
        self._keeper.close()


def spawned(make: bytes) -> Parent:
    """A parent that is a separate Python, for a process that has threads. `make`, a pickled function, is called there
    and returns what workers do; UserError with what it raised, or if it takes longer than MAKE_S seconds."""
    control, theirs = socket.socketpair()
    # The driver's, if it has one: an agent that begins anew on another machine repeats its steps.
    seed = os.environ.get("PYTHONHASHSEED", "0")
    with theirs:
        process = spawn(f"from {__name__} import serve_spawned; serve_spawned()", theirs, hash_seed=seed)
    problem = _make_there(Channel(control), make)
    parent = Parent(process.pid, control, process.wait)
    if problem:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)  # with whatever it has started
        parent.close()
        raise UserError(problem)
    return parent


def _make_there(control: Channel, make: bytes) -> str:
    """Has a parent make what workers serve; gives what was wrong with that, or an empty text."""
    with contextlib.suppress(OSError):  # it has ended, which the next lines find
        control.send(make)
    end = time.monotonic() + MAKE_S
    while wait([control.fileno()], max(0.0, end - time.monotonic())):
        if answers := control.receive():
            return answers[0]
        if control.ended or control.broken:
            return "the process that starts workers ended at once"
    return f"its files were not loaded within {MAKE_S:g} s"


def serve_spawned() -> None:
    """All that the parent of a `spawned` server does."""
    control = Channel(connection())
    messages: list[bytes] = []
    while not (messages or control.ended):
        messages = control.receive()
    try:
        serve = pickle.loads(messages[0])()
        end_with_parent(False)  # from here on it outlives its parent by a moment, to end workers that hang
        control.send("")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _serve_forks(control.socket, serve)
    except BaseException as error:  # whatever a user's file does when it is imported
        with contextlib.suppress(OSError):  # nobody waits for it any more
            control.send(first_line(error))
    finally:
        os._exit(0)  # nothing of what the user's files have registered for the end, and no thread of theirs


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


def _keep_parents(control: socket.socket, serve: Serve, prepare: Callable[[], None] | None) -> None:
    """All that a keeper does: its workers are parents."""
    if prepare is not None:
        prepare()

    def be_parent(channel: Channel, _: Marks) -> None:
        end_with_parent(False)  # it is of use without its keeper, and outlives the trainer by a moment
        _serve_forks(channel.socket, serve)

    _serve_forks(control, be_parent, grace_s=2 * _GRACE_S)


def _serve_forks(control: socket.socket, serve: Serve, grace_s: float = _GRACE_S) -> None:
    gc.freeze()  # a collection in a worker would copy every page that it looks at
    alive, own = dict[int, Marks](), os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(control, _REQUEST.size, 1)
        if len(data) < _REQUEST.size:  # the trainer has closed its end, or is gone
            break
        kind, pid = _REQUEST.unpack(data)
        if kind == b"F":
            marks = Marks()
            try:
                pid = os.fork()
            except OSError as error:  # out of processes, or of memory: this may pass
                pid = -(error.errno or errno.EAGAIN)
            if pid == 0:
                control.close()
                channel = Channel(socket.socket(fileno=fds[0]))
                _run(partial(_work, own, serve, channel, marks))
            os.close(fds[0])
            if pid > 0:
                alive[pid] = marks
            control.sendall(_REPLY.pack(pid))
        else:
            status, places = _kill(pid), alive.pop(pid).places()
            control.sendall(b"".join(map(_REPLY.pack, (status, len(places), *places))))
    end = time.monotonic() + grace_s  # workers see that their channels have ended
    while alive and time.monotonic() < end:
        alive = {pid: marks for pid, marks in alive.items() if os.waitpid(pid, os.WNOHANG)[0] == 0}
        time.sleep(0.01)
    for pid in alive:
        _kill(pid)


def _work(parent: int, serve: Serve, channel: Channel, marks: Marks) -> None:
    end_with_parent(True)  # how it ends could not be known afterwards, and one that hangs could not be killed
    if os.getppid() == parent:
        serve(channel, marks)


def _kill(pid: int) -> int:
    """The status of a worker, which may have ended before; what it started ends with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    # The kill may come before the worker has made its group.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]
