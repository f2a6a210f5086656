"""How the first process of a job runs a program: forks its process, exchanges messages with it, and ends it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any, NoReturn

from posttrain.sandbox import kernel, wire

# How often orphans are reaped. Unreaped ones would count towards the process limit.
_LOOK_MS = 50
LONGEST_REPLY = 32 << 20


class Ended(Exception):
    """The program has ended, or was ended because it exceeded a limit."""


class Program:
    """A forked process. It calls `body` with the descriptor of its end of a channel; the result is its exit code."""

    def __init__(self, body: Callable[[int], int], stdin: str, seconds: float, output_bytes: int) -> None:
        self._start = time.monotonic()
        self._end, self._room = self._start + seconds, output_bytes
        self.limit: str | None = None  # the limit that it exceeded
        self.exit_code: int | None = None
        self.gone = False
        source = _as_file(stdin)
        out, err = os.pipe(), os.pipe()
        self._channel, theirs = _pair()
        self._pid = os.fork()
        if self._pid == 0:
            _become_program(source, out[1], err[1], theirs, body)
        for fd in (source, out[1], err[1], theirs):
            os.close(fd)
        self._pidfd = os.pidfd_open(self._pid)
        self._written: dict[int, list[bytes]] = {out[0]: [], err[0]: []}
        self._read_so_far = [0, 0]
        self._poll = select.poll()
        for fd in (*self._written, self._pidfd):
            os.set_blocking(fd, False)
            self._poll.register(fd, select.POLLIN)

    def send(self, message: Any) -> None:
        """Send the program a message. Raises Ended if it no longer reads."""
        try:
            wire.send(self._channel, message)
        except wire.Closed:
            self._raise_ended()

    def receive(self) -> Any:
        """Return the program's next message. Raises Ended if there will be none."""
        try:
            return wire.receive(self._channel, LONGEST_REPLY, lambda: self._collect_until(self._channel))
        except wire.Closed:
            self._raise_ended()

    def read_new_output(self) -> tuple[str, str]:
        """Return what it has written to standard output and error since the last call."""
        found = []
        for place, (fd, chunks) in enumerate(self._written.items()):
            while self._read_available(fd):
                pass
            data = b"".join(chunks)
            found.append(data[self._read_so_far[place] :].decode(errors="replace"))
            self._read_so_far[place], chunks[:] = len(data), [data]
        return found[0], found[1]

    def _raise_ended(self) -> NoReturn:
        select.select([self._pidfd], [], [], 0.2)  # usually it is about to end, and its exit code says more
        self._reap()
        self.gone = True
        raise Ended

    def wait(self) -> dict[str, Any]:
        """Let it run to its end, or to a limit; return its status and output."""
        with contextlib.suppress(Ended):
            self._collect_until(None)
        return self.end()

    def end(self) -> dict[str, Any]:
        """End it and all that it started."""
        alive = self.exit_code is None
        self._kill_all()
        for fd in list(self._written):
            while self._read_available(fd):
                pass
            os.close(fd)
        os.close(self._pidfd)
        os.close(self._channel)
        stdout, stderr = (b"".join(chunks).decode(errors="replace") for chunks in self._written.values())
        return {
            "status": "ok" if alive and self.limit is None else self._status(stderr),
            "exit_code": None if alive and self.limit is None else self.exit_code,
            "stdout": stdout,
            "stderr": stderr,
            "seconds": round(time.monotonic() - self._start, 4),
        }

    def _status(self, stderr: str) -> str:
        if self.limit:
            return self.limit
        if self.exit_code == -signal.SIGXCPU:
            return "timeout"
        last = stderr.rstrip().rpartition("\n")[2]
        if self.exit_code not in (0, None) and last.startswith("MemoryError"):
            return "memory"
        return "error" if self.exit_code else "ok"

    def _collect_until(self, wanted: int | None) -> None:
        # Collects output until `wanted` can be read. Raises Ended at the program's end, or if it exceeds a limit.
        if wanted is not None:
            self._poll.register(wanted, select.POLLIN)
        try:
            while True:
                left = self._end - time.monotonic()
                ready = [fd for fd, _ in self._poll.poll(max(0.0, min(left * 1000, _LOOK_MS)))]
                for fd in self._written:
                    if fd in ready and not self._read_available(fd):
                        self._poll.unregister(fd)
                self._reap()
                if self.limit is None and left <= 0:
                    self.limit = "timeout"
                if wanted in ready and self.limit is None:
                    return
                if self.limit or self._pidfd in ready:
                    self.gone = True
                    raise Ended
        finally:
            if wanted is not None:
                self._poll.unregister(wanted)

    def _read_available(self, fd: int) -> bool:
        # False at the end of the stream, and if nothing is there now.
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        self._written[fd].append(data[: max(self._room, 0)])
        self._room -= len(data)
        if self._room < 0:
            self.limit = self.limit or "output"
            return False
        return bool(data)

    def _reap(self, options: int = os.WNOHANG) -> bool:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, options)
                if pid == self._pid:
                    self.exit_code = os.waitstatus_to_exitcode(status)
                if pid == 0:
                    return True
        return False

    def _kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpid() == 1:
                os.kill(-1, signal.SIGKILL)  # everything in this namespace but us
            else:
                os.killpg(self._pid, signal.SIGKILL)
        self._reap(0)


def _become_program(source: int, out: int, err: int, channel: int, body: Callable[[int], int]) -> None:
    code = 1
    try:
        os.setpgid(0, 0)  # so that killpg reaches all of it; the session stays the job's
        # So that the template can read how much of the memory is its own.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1, "dumpable")
        for fd, place in ((source, 0), (out, 1), (err, 2)):
            os.dup2(fd, place)
        kernel.close_all_but([0, 1, 2, channel])
        code = body(channel)
    finally:
        os._exit(code)


def _pair() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def _as_file(text: str) -> int:
    if not text:
        return os.open("/dev/null", os.O_RDONLY)
    with tempfile.TemporaryFile(dir=os.environ["TMPDIR"]) as file:
        file.write(text.encode(errors="surrogatepass"))
        file.seek(0)
        return os.dup(file.fileno())
