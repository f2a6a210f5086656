"""Text on a terminal: colours that help to find a line again (none in pipes, logs, or with NO_COLOR), and long lines
broken between words, not inside the name of a setting."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import TextIO

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
    """Whether a person looks at this stream through something that can move its cursor."""
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
    """The same for a page of prose, whose lines have a width of their own: paragraphs are wrapped again."""
    width = columns(sys.stdout)
    print(fold_lines(_paragraphs(text), width, hang=0) if is_terminal(sys.stdout) else text, flush=True)


def fold_lines(text: str, width: int, hang: int = 2) -> str:
    """The text with its long lines broken, and what follows set in by `hang` columns."""
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
