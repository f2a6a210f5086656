"""The output of a bench: a status line and aligned tables."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence


class StatusLine:
    """The line that says what is being done. It goes to stderr, so that stdout has the table alone."""

    def __init__(self) -> None:
        self.stream = sys.stderr
        # In a log, each status is a line of its own; rewriting one would fill it with control characters.
        self.live = self.stream.isatty()

    def begin(self, text: str) -> Callable[[float], None]:
        """Show `text`; gives what shows it again with the seconds since then."""
        if self.live:
            self._rewrite(text)
        else:
            print(text, file=self.stream, flush=True)
        return lambda seconds: self.wait(text, seconds)

    def wait(self, text: str, seconds: float) -> None:
        if self.live:
            self._rewrite(f"{text}  {seconds:.0f} s")

    def clear(self) -> None:
        if self.live:
            self._rewrite("")

    def _rewrite(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self.stream.write("\r\x1b[K" + text[:width])
        self.stream.flush()


def render(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Columns in `left` are aligned to the left, the others to the right; the last one is never padded."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    shown = []
    for line in [lines[0], rule, *lines[1:]]:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)


def factor(value: float, ours: float | None) -> str:
    return "-" if not ours else f"{value / ours:.2f}x"
