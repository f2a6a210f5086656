"""The console of a run, which may go away: a pipe that is closed (`| head`), a terminal that hangs up, a full disk.

Watching a run must never end it: inside a run, writing to the console cannot fail, and what the console does not take
is in the run's log. `exit_status` ends a whole command: it prints errors that are meant for users in their own words,
and Ctrl-C and lost output in a line.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from posttrain.errors import UserError
from posttrain.interrupts import interrupted
from posttrain.tracking.terminal_text import tell


class Console:
    """A stand-in for a stream: characters that it cannot show are escaped, and once it fails it is left alone.

    `on_lost` gets one sentence, once; it is not called for a stream that was never there.
    """

    def __init__(
        self, stream: TextIO | None, on_lost: Callable[[str], object] | None = None, *, owned: bool = False
    ) -> None:
        self._stream, self.on_lost, self._owned = stream, on_lost, owned
        self.lost, self.why = stream is None, ""

    def write(self, text: str) -> int:
        if self._stream is not None and not self.lost:
            self._try(lambda stream: _write(stream, text))
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            self._try(lambda stream: stream.flush())

    def close(self) -> None:
        """Of a stream that was made for this console alone."""
        assert self._owned and self._stream is not None
        self.flush()
        self.lost = True
        with suppress(OSError, ValueError):
            self._stream.close()

    def isatty(self) -> bool:
        return not self.lost and bool(self._try(lambda stream: stream.isatty()))

    def _try(self, action: Callable[[TextIO], Any]) -> Any:
        assert self._stream is not None
        try:
            return action(self._stream)
        except BlockingIOError:  # a reader that is slow; what it missed is in the log
            return None
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self.lose()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.why = f"The console could not be written ({reason}); the run goes on without it."
            if self.on_lost is not None:
                self.on_lost(self.why)
            return None

    def lose(self) -> None:
        """Write no more; what Python still holds for the process's own stream must not fail at the end either."""
        self.lost = True
        if self._stream is not None and (self._owned or self._stream in (sys.__stdout__, sys.__stderr__)):
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # encoding, fileno, ...


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def as_console(stream: Any, on_lost: Callable[[str], object] | None = None) -> Console:
    """`stream` as a Console, wrapped once."""
    if not isinstance(stream, Console):
        return Console(stream, on_lost)
    stream.on_lost = on_lost or stream.on_lost
    return stream


def prepare_streams() -> None:
    """For the start of a program: streams that were closed lead nowhere, and no character is an error.

    A descriptor that is missing would be given to the next file that is opened, and be written to as the console.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (as long as the process)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def keep_going() -> None:
    """For the start of a command that trains: from here on the console cannot end it."""
    sys.stdout, sys.stderr = as_console(sys.stdout), as_console(sys.stderr)  # pyright: ignore


@contextmanager
def hang_up_is_no_end() -> Iterator[None]:
    """Inside, a terminal that goes away (SIGHUP) does not end the process; `nohup` and handlers of others stay."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGHUP, lambda *_: None)  # a function: programs started from here are not affected
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)


INTERRUPTED = "interrupted"


def exit_status(work: Callable[[], int], *, if_interrupted: str = INTERRUPTED) -> int:
    """The status with which a process ends that does this work."""
    try:
        status = work()
        sys.stdout.flush()
        return status
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or interrupted():
            print(if_interrupted, file=sys.stderr)
            return 130
        if isinstance(error, UserError):
            tell(error, sys.stderr)
            return 2
        if isinstance(error, BrokenPipeError) and _nobody_reads(sys.stdout):  # `posttrain config | head`
            as_console(sys.stdout).lose()
            return 141
        if not _is_lost_output(error):
            raise
        as_console(sys.stdout).lose()
        print(f"The output could not be written: {error}.", file=sys.stderr)
        return 1


def _nobody_reads(stream: TextIO) -> bool:
    """Whether the other end of this pipe is closed: the same error may come from any other one."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (OSError, ValueError, AttributeError):
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _is_lost_output(error: Any) -> bool:
    """`posttrain config > /dev/full`: an error of writing that names no file."""
    codes = (errno.ENOSPC, errno.EIO, errno.EBADF)
    return isinstance(error, OSError) and error.filename is None and error.errno in codes
