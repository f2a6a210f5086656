"""What libraries say during a run: Python's warnings, loggers, and what reaches descriptors 1 and 2, kept in
`logs/libraries.log` and off the console."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from posttrain.tracking.own_console import active

NAME = "libraries.log"


class LibraryLog:
    """A file that is made when something is written to it; one that cannot be written is no reason to stop."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.RLock()
        self._file: TextIO | None = None

    def write(self, text: str) -> None:
        with self._lock, suppress(OSError, ValueError):
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
            self._file.write(text)

    def close(self) -> None:
        with self._lock, suppress(OSError):
            if self._file is not None:
                self._file.close()


@contextmanager
def libraries_apart(folder: Path, consoles: tuple[Any, ...]) -> Iterator[None]:
    """Inside, warnings and what loggers would write to one of `consoles` (or to the streams that stand for them) go to
    the file in `folder`."""
    log = LibraryLog(folder / NAME)
    command = active()
    if command is not None:
        command.attach(folder / NAME)
    shown, emitted = warnings.showwarning, logging.StreamHandler.emit

    def showwarning(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if file is not None:
            return shown(message, category, filename, lineno, file, line)
        log.write(warnings.formatwarning(message, category, filename, lineno, line))

    def emit(self: Any, record: logging.LogRecord) -> None:
        if not _is_console(self.stream, consoles):
            return emitted(self, record)
        try:
            log.write(self.format(record) + self.terminator)
        except Exception:  # a format that does not fit its arguments: told as logging tells it
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


def _is_console(stream: Any, consoles: tuple[Any, ...]) -> bool:
    known = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, *consoles)
    return any(stream is one for one in known)
