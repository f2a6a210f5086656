"""What a run shows: a bar over the steps, one line per step, and notes; all text also goes into the run's log file.

`say` is how posttrain speaks to its user anywhere: above the bar where there is one, as a plain line elsewhere.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from posttrain.tracking.console import as_console

ADVICE_EVERY = 10
"""The same advice is printed again after this many steps."""

_active: Progress | None = None


def say(text: str) -> None:
    """Print one note, without tearing a progress bar apart; a running tee writes it to the log too."""
    bar = _active
    if bar is None or not bar.has_bar or isinstance(sys.stdout, Tee):  # a tee moves the bar itself
        print(text, flush=True)
    else:
        with bar.moved_away(sys.stdout):
            print(text, flush=True)


class Tee:
    """A stand-in for `sys.stdout` or `sys.stderr` that writes to it and to a log file."""

    def __init__(self, stream: Any, log: TextIO, lock: threading.RLock) -> None:
        self.stream, self._log, self._lock = stream, log, lock
        self._pending, self._lost, self._log_failed = "", "", False

    def write(self, text: str) -> int:
        with self._lock:
            self._to_log(lambda: self._log.write(text))
            self._show(text)
            if self._lost and text.endswith("\n"):
                self._log_loss()
        return len(text)

    def _to_log(self, action: Callable[[], object]) -> None:
        # A log on a full disk must not end the run; what is printed is still shown.
        try:
            action()
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
            with bar.moved_away(self.stream):
                self.stream.write(lines + "\n")

    def lost_console(self, other: TextIO, path: Path, text: str) -> None:
        """Says so where it can still be read: in the log, and on the other stream."""
        self._lost = text  # into the log after the line that is being written
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
    """Everything printed in this process, also by user code, goes to the console and is added to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
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
        yield
    finally:
        # Only what is still ours is put back: someone else may have replaced the streams meanwhile.
        if sys.stdout is tees[0]:
            sys.stdout = before[0]
        if sys.stderr is tees[1]:
            sys.stderr = before[1]
        for tee in tees:
            tee.finish()
        with suppress(OSError):  # what a full disk did not take was said when it was written
            log.close()


class Progress:
    """A bar over the steps of a run on a terminal; elsewhere, one line per step."""

    def __init__(self, total: int, *, done: int = 0, stream: TextIO | None = None) -> None:
        self._stream = stream or _console(sys.stderr)
        self._total, self._done = total, done
        self._bar: Any = None
        self._advised: dict[str, int] = {}

    @property
    def has_bar(self) -> bool:
        return self._bar is not None

    def __enter__(self) -> Progress:
        global _active
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, initial=self._done, file=self._stream, unit="step", dynamic_ncols=True)
        _active = self
        return self

    def __exit__(self, *exc: object) -> None:
        global _active
        _active = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @contextmanager
    def moved_away(self, stream: TextIO) -> Iterator[None]:
        """Take the bar off the screen while `stream` is written to."""
        with self._bar.external_write_mode(file=stream):
            yield

    def step(
        self,
        line: str,
        advice: Sequence[str] = (),
        *,
        reward: float | None = None,
        loss: float | None = None,
        quiet: bool = False,
    ) -> None:
        """One step is done: print its line and its advice (unless `quiet`), and move the bar, reward or loss beside
        it."""
        self._done += 1
        if not quiet:
            say(f"step {self._done}/{self._total}: {line}")
        for sentence in advice:
            if not quiet and self._is_news(sentence):
                say(f"  ! {sentence}")
        if self._bar is not None:
            for name, value in (("reward", reward), ("loss", loss)):
                if value is not None:
                    self._bar.set_postfix_str(f"{name} {value:.3f}", refresh=False)
            self._bar.update(1)

    def _is_news(self, sentence: str) -> bool:
        kind = re.sub(r"[\d.,]+", "#", sentence)  # the same sentence with other numbers is the same advice
        if self._done - self._advised.get(kind, -ADVICE_EVERY) < ADVICE_EVERY:
            return False
        self._advised[kind] = self._done
        return True


def _console(stream: TextIO) -> TextIO:
    """The stream below a tee: a bar redraws itself and has no place in a log."""
    return stream.stream if isinstance(stream, Tee) else stream
