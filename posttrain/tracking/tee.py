"""Prints go to the console, above a live row, and into the run's log.

Output of libraries (warnings, loggers, descriptors 1 and 2) goes to `logs/libraries.log` instead.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from posttrain.tracking.console import active as active_console
from posttrain.tracking.console import as_console, is_terminal, plain

LIBRARY_LOG = "libraries.log"


class LibraryLog:
    """A file that is created at the first write; failures to write are ignored."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.RLock()
        self._file: TextIO | None = None

    def write(self, text: str) -> None:
        with self._lock, suppress(OSError, ValueError):
            # Created at the first write, so that a run without library output leaves no empty file.
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
            self._file.write(text)

    def close(self) -> None:
        with self._lock, suppress(OSError):
            if self._file is not None:
                self._file.close()


@contextmanager
def redirect_libraries(folder: Path, consoles: tuple[Any, ...]) -> Iterator[None]:
    """Inside, warnings and what loggers would write to one of `consoles` (or to streams that wrap them) go to
    the file in `folder`."""
    log = LibraryLog(folder / LIBRARY_LOG)
    command = active_console()
    if command is not None:
        command.attach(folder / LIBRARY_LOG)
    # Patched at the class: libraries add handlers whenever they are imported, long after the run has begun.
    shown, emitted = warnings.showwarning, logging.StreamHandler.emit

    def showwarning(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if file is not None:
            return shown(message, category, filename, lineno, file, line)
        log.write(warnings.formatwarning(message, category, filename, lineno, line))

    def emit(self: Any, record: logging.LogRecord) -> None:
        known = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, *consoles)
        if not any(self.stream is console for console in known):
            return emitted(self, record)
        try:
            log.write(self.format(record) + self.terminator)
        except Exception:  # e.g. a format that does not match its arguments: report it as logging does
            self.handleError(record)

    warnings.showwarning, logging.StreamHandler.emit = showwarning, emit
    try:
        yield
    finally:
        if warnings.showwarning is showwarning:
            warnings.showwarning = shown
        if logging.StreamHandler.emit is emit:
            logging.StreamHandler.emit = emitted
        log.close()


class Bar(Protocol):
    """What draws a live row on the screen."""

    @property
    def has_bar(self) -> bool: ...

    def hidden_while_writing(self, stream: TextIO) -> AbstractContextManager[None]:
        """Take the row off the screen while `stream` is written to."""
        ...


_active: Bar | None = None


def active() -> Bar | None:
    """The bar on the screen, if any."""
    return _active


def set_active_bar(bar: Bar | None) -> None:
    global _active
    _active = bar


class Tee:
    """Replaces `sys.stdout` or `sys.stderr`: writes to it and to a log file."""

    def __init__(self, stream: Any, log: TextIO, lock: threading.RLock) -> None:
        self.stream, self._log, self._lock = stream, log, lock
        self._pending, self._lost, self._log_failed = "", "", False
        self._hid_bar = False

    def write(self, text: str) -> int:
        self._write(text, text)
        return len(text)

    def say(self, text: str, shown: str) -> None:
        """A note: `text` goes into the log, `shown` to the console."""
        self._write(f"{text}\n", f"{shown}\n")
        self.flush()

    def _write(self, text: str, shown: str) -> None:
        with self._lock:
            if not _is_bar(text):  # a bar that is redrawn would fill the log
                self._to_log(lambda: self._log.write(plain(text)))
            if not self._hides(text):
                self._show(shown)
            if self._lost and text.endswith("\n"):
                self._log_loss()

    def _hides(self, text: str) -> bool:
        # A library's progress bar is hidden if there is a live row already, or no terminal.
        if text == "\n" and self._hid_bar:  # the bar's end
            self._hid_bar = False
            return True
        row = _active is not None and _active.has_bar
        self._hid_bar = _is_bar(text) and (row or not is_terminal(self.stream))
        return self._hid_bar

    def _to_log(self, action: Callable[[], object]) -> None:
        # A log on a full disk must not end the run; what is printed is still shown.
        try:
            action()
        except ValueError:  # closed: a library's handler outlived the run
            return
        except OSError as error:
            if not self._log_failed:
                self._log_failed = True
                self.stream.write(f"The log file could not be written: {error}.\n")

    def _show(self, text: str) -> None:
        bar = _active
        if bar is None or not bar.has_bar:
            self.stream.write(text)
            return
        # `print` hands over the text and its line end one after the other; the bar is moved once per whole line.
        self._pending += text
        if "\n" in self._pending:
            lines, _, self._pending = self._pending.rpartition("\n")
            with bar.hidden_while_writing(self.stream):
                self.stream.write(lines + "\n")

    def lost_console(self, other: TextIO, path: Path, text: str) -> None:
        """Report it in the log and on the other stream."""
        self._lost = text  # logged after the line that is being written
        other.write(f"{text} Its log: {path}\n")

    def _log_loss(self) -> None:
        text, self._lost = self._lost, ""
        self._to_log(lambda: self._log.write(f"{text}\n"))

    def flush(self) -> None:
        with self._lock:
            self._to_log(self._log.flush)
            self.stream.flush()

    def finish(self) -> None:
        with self._lock:
            self.stream.write(self._pending)
            self._pending = ""
            if self._lost:
                self._log_loss()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)  # isatty, encoding, fileno, ...


@contextmanager
def tee_output(path: Path) -> Iterator[None]:
    """Everything printed in this process, also by user code, goes to the console and is added to the file `path`; what
    libraries print (warnings, loggers) goes to another file in that folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # One lock for both streams, which share the log, the screen and the live row.
    lock = threading.RLock()
    log = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    before = sys.stdout, sys.stderr
    consoles: list[Any] = [as_console(stream) for stream in before]
    tees = Tee(consoles[0], log, lock), Tee(consoles[1], log, lock)
    for tee, other in zip(tees, reversed(consoles), strict=True):
        tee.stream.on_lost = partial(tee.lost_console, other, path)
        if tee.stream.why:  # it was lost before there was a log
            tee.stream.on_lost(tee.stream.why)
    sys.stdout, sys.stderr = tees
    try:
        with redirect_libraries(path.parent, (*before, *consoles, *tees)):
            yield
    finally:
        # Only restored if they are still ours: other code may have replaced the streams meanwhile.
        if sys.stdout is tees[0]:
            sys.stdout = before[0]
        if sys.stderr is tees[1]:
            sys.stderr = before[1]
        for tee in tees:
            tee.finish()
        with suppress(OSError):  # a full disk was reported when the text was written
            log.close()


def _is_bar(text: str) -> bool:
    return "\r" in text and not text.endswith("\n")


def underlying_console(stream: TextIO) -> TextIO:
    """The stream below a tee, for a row that is redrawn and must not fill the log."""
    return stream.stream if isinstance(stream, Tee) else stream
