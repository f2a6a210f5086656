"""The line that says what is being done: rewritten in place on a terminal, printed once per event elsewhere."""

from __future__ import annotations

import shutil
import sys


class Line:
    """Writes to stderr, so that the table alone goes to stdout."""

    def __init__(self) -> None:
        self.stream = sys.stderr
        self.live = self.stream.isatty()

    def show(self, text: str) -> None:
        """Something new begins."""
        if self.live:
            self._rewrite(text)
        else:
            print(text, file=self.stream, flush=True)

    def waiting(self, text: str, seconds: float) -> None:
        """It still goes on."""
        if self.live:
            self._rewrite(f"{text}  {seconds:.0f} s")

    def clear(self) -> None:
        if self.live:
            self._rewrite("")

    def _rewrite(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self.stream.write("\r\x1b[K" + text[:width])
        self.stream.flush()
