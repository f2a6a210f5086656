"""How a whole command ends: errors that are meant for users in their words, Ctrl-C and lost output in a line."""

from __future__ import annotations

import errno
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

from posttrain.errors import UserError
from posttrain.interrupts import interrupted
from posttrain.tracking.console import as_console
from posttrain.tracking.folding import tell

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
