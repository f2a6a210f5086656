"""The console of a run, which may go away: a pipe that is closed (`| head`), a terminal that hangs up, a full disk.

Watching a run must never end it: inside a run, writing to the console cannot fail, and everything is in the run's log.
`exit_status` wraps a whole command and prints user errors, Ctrl-C and lost output in one line.

A command that trains has three output modes: posttrain's messages, its result alone (--quiet), or one JSON object per
step (--json). Meanwhile descriptors 1 and 2 lead to the run's `logs/libraries.log`, so that output of C++ code and of
started programs does not break the live row. Before the run has a directory that output is buffered.

Text on a terminal has colours that help to find a line again (none in pipes, logs, or with NO_COLOR), and long lines
are broken between words, not inside the name of a setting.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from posttrain.errors import UserError
from posttrain.interrupts import interrupted

CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_SGR = re.compile(r"\x1b\[[\d;]*m")
_STYLES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"  ! .*", re.S), "yellow"),
    (re.compile(r"note: .*", re.S), "dim"),
    (re.compile(r"(?:saved |  (?=\S+ \S+  ))[^\n]*", re.S), "dim"),
    (re.compile(r"validation at step \d+: .*", re.S), "bold"),
    (re.compile(r"The run failed.*", re.S), "red"),
)
_STEP = re.compile(r"(step \d+/\d+: )(.*)", re.S)
_TREND = re.compile(r"(?<=reward )(\S+ )(\((?:\+|-)[\d.e-]+\))")


def is_terminal(stream: TextIO) -> bool:
    """Whether this stream is a terminal that can move its cursor."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def has_colour(stream: TextIO) -> bool:
    """NO_COLOR (any text) switches colour off; see https://no-color.org."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, style: str) -> str:
    return f"\x1b[{CODES[style]}m{text}\x1b[0m"


def add_colours(text: str) -> str:
    """A line of the console in the colours of its kind (step, advice, ...)."""
    found = _STEP.fullmatch(text)
    if found:
        return styled(found[1], "dim") + _TREND.sub(_trend, found[2])
    style = next((style for pattern, style in _STYLES if pattern.fullmatch(text)), None)
    return styled(text, style) if style else text


def _trend(found: re.Match[str]) -> str:
    return found[1] + styled(found[2], "green" if found[2].startswith("(+") else "red")


def plain(text: str) -> str:
    return _SGR.sub("", text) if "\x1b" in text else text


_FULL = 90  # a line of at least so many columns was broken because it was full


def print_text(text: object, stream: TextIO | None = None) -> None:
    """Print an answer of a command: broken between words on a terminal, as it is elsewhere."""
    out: TextIO = stream or sys.stdout
    print(fold_lines(str(text), columns(out)) if is_terminal(out) else text, file=out, flush=True)


def print_page(text: str) -> None:
    """Print a page of prose: on a terminal its paragraphs are wrapped to the width of the terminal."""
    width = columns(sys.stdout)
    print(fold_lines(_paragraphs(text), width, hang=0) if is_terminal(sys.stdout) else text, flush=True)


def fold_lines(text: str, width: int, hang: int = 2) -> str:
    """The text with long lines broken; continuation lines are indented by `hang` more columns."""
    return "\n".join(line if len(line) <= width else _break_line(line, width, hang) for line in text.split("\n"))


def _break_line(line: str, width: int, hang: int) -> str:
    edge = " " * (len(line) - len(line.lstrip(" ")) + hang)
    pieces = textwrap.wrap(line, width, subsequent_indent=edge, break_long_words=False, break_on_hyphens=False)
    return "\n".join(pieces)


def _paragraphs(text: str) -> str:
    # Paragraphs that were broken at a page's own width as one line each; formulas, lists and tables stay.
    lines = text.split("\n")
    for place in reversed(range(len(lines) - 1)):
        line, following = lines[place : place + 2]
        if len(line) >= _FULL and re.match(r"\S", line) and re.match(r"[^\s|-]", following):
            lines[place : place + 2] = [f"{line} {following}"]
    return "\n".join(lines)


def columns(stream: TextIO) -> int:
    """The width of the terminal now: it may be resized at any time."""
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns or 80)
    except (OSError, ValueError, AttributeError):  # closed, or no stream at all
        return 80


class Console:
    """Wraps a stream: unsupported characters are escaped, and after a failure nothing more is written.

    `on_lost` is called once with a sentence, but not if there was no stream in the first place.
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
        """Close the stream, which was made for this console alone."""
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
        except BlockingIOError:  # a slow reader; what it misses is in the log
            return None
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self.lose()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.why = f"The console could not be written ({reason}); the run goes on without it."
            if self.on_lost is not None:
                self.on_lost(self.why)
            return None

    def lose(self) -> None:
        """Stop writing. The descriptor leads to /dev/null from here on, because Python flushes its buffers at exit."""
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


def as_console(stream: Any) -> Console:
    """`stream` as a Console, wrapped once."""
    return stream if isinstance(stream, Console) else Console(stream)


def prepare_streams() -> None:
    """For the start of a program: closed streams lead to /dev/null, and no character is an error."""
    # A missing descriptor would be given to the next opened file, which would then receive the console's output.
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


def protect_console() -> None:
    """For the start of a command that trains: from here on the console cannot end it."""
    sys.stdout, sys.stderr = as_console(sys.stdout), as_console(sys.stderr)  # pyright: ignore


@contextmanager
def ignore_hangup() -> Iterator[None]:
    """Inside, a closed terminal (SIGHUP) does not end the process; `nohup` and other handlers stay."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGHUP, lambda *_: None)  # unlike SIG_IGN, not inherited by started programs
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)


INTERRUPTED = "interrupted"


def exit_status(work: Callable[[], int], *, if_interrupted: str = INTERRUPTED) -> int:
    """Run `work` and give the process's exit status."""
    try:
        status = work()
        sys.stdout.flush()
        return status
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or interrupted():
            print(if_interrupted, file=sys.stderr)
            return 130
        if isinstance(error, UserError):
            print_text(error, sys.stderr)
            return 2
        if isinstance(error, BrokenPipeError) and _is_closed_pipe(sys.stdout):  # `posttrain config | head`
            as_console(sys.stdout).lose()
            return 141
        if not _is_lost_output(error):
            raise
        as_console(sys.stdout).lose()
        print(f"The output could not be written: {error}.", file=sys.stderr)
        return 1


def _is_closed_pipe(stream: TextIO) -> bool:
    # The error may come from another pipe.
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (OSError, ValueError, AttributeError):
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _is_lost_output(error: Any) -> bool:
    # `posttrain config > /dev/full`: an error of writing that names no file.
    codes = (errno.ENOSPC, errno.EIO, errno.EBADF)
    return isinstance(error, OSError) and error.filename is None and error.errno in codes


# -- the console of a command that trains ------------------------------------------------------------------------------
NORMAL, QUIET, JSON = "normal", "quiet", "json"
OUTPUT_MODES = {"--quiet": QUIET, "--json": JSON}
HELP = "--quiet shows errors and the last result only, --json one JSON object per step and nothing else"

_active: CommandConsole | None = None


def split_output_mode(args: Sequence[str]) -> tuple[list[str], str]:
    """The arguments without `--quiet` and `--json`, and which of them was there."""
    found = {OUTPUT_MODES[arg] for arg in args if arg in OUTPUT_MODES}
    if len(found) > 1:
        raise UserError("--quiet and --json exclude each other: give one of them.")
    return [arg for arg in args if arg not in OUTPUT_MODES], found.pop() if found else NORMAL


@contextmanager
def command_console(mode: str = NORMAL) -> Iterator[CommandConsole]:
    """The console of a command; streams and descriptors are restored afterwards."""
    global _active
    before, console = _active, CommandConsole(mode)
    console.redirect()
    _active = console
    try:
        yield console
    finally:
        _active = before
        console.restore()


class CommandConsole:
    """`out` and `err` lead to the console, whatever sys.stdout is."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._before = sys.stdout, sys.stderr
        self.out, self.err = as_console(sys.stdout), as_console(sys.stderr)
        self._kept: list[int] = []
        self._held: Any = None

    def redirect(self) -> None:
        for stream in self._before:
            with suppress(OSError, ValueError):
                stream.flush()
        if [_descriptor(stream) for stream in self._before] == [1, 2]:
            self._kept = [os.dup(1), os.dup(2)]
            self.out, self.err = (
                Console(_stream_like(stream, kept), owned=True)
                for stream, kept in zip(self._before, self._kept, strict=True)
            )
            self._held = tempfile.TemporaryFile()  # noqa: SIM115 (until the run has a directory)
            self._lead_to(self._held.fileno())
        loud = self.mode == NORMAL
        sys.stdout, sys.stderr = (self.out, self.err) if loud else (Console(None), Console(None))  # pyright: ignore

    def attach(self, path: Path) -> None:
        """Lead descriptors 1 and 2 to this file, which gets the buffered output first."""
        if self._held is None:
            return
        with path.open("ab") as file:
            self._held.seek(0)
            shutil.copyfileobj(self._held, file)
            file.flush()
            self._lead_to(file.fileno())
        self._held.close()
        self._held = None

    def restore(self) -> None:
        sys.stdout, sys.stderr = self._before
        for console in (self.out, self.err):
            console.flush()
        for number, kept in zip((1, 2), self._kept, strict=False):
            os.dup2(kept, number)
        if self._held is not None:  # there was no run: the output may say why
            self._held.seek(0)
            with suppress(OSError):
                os.write(2, self._held.read())
            self._held.close()
        if self._kept:
            for console in (self.out, self.err):
                console.close()

    def write_step(self, line: Mapping[str, Any]) -> None:
        """A step's numbers, as `metrics.jsonl` has them."""
        if self.mode == JSON:
            self.out.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            self.out.flush()

    def end(self, result: Any) -> None:
        """The last line of a quiet command; other results than a run's have been shown."""
        if self.mode == QUIET and hasattr(result, "steps"):
            self.out.write(f"{result}\n")
            self.out.flush()

    def alert(self, text: str) -> None:
        """Shown even if the command is quiet."""
        if self.mode != NORMAL:
            self.err.write(f"{text}\n")
            self.err.flush()

    @staticmethod
    def _lead_to(descriptor: int) -> None:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)


def active() -> CommandConsole | None:
    """The console of the command that runs, if this process is one."""
    return _active


def _descriptor(stream: Any) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):  # closed, or no file at all: a notebook's
        return None


def _stream_like(stream: Any, descriptor: int) -> TextIO:
    raw = io.FileIO(descriptor, "w", closefd=True)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=os.isatty(descriptor),
    )
