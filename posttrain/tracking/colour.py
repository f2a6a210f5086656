"""Colour where it helps to find a line again: advice, notes, validations. None in pipes, logs, or with NO_COLOR."""

from __future__ import annotations

import os
import re
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


def painted(text: str) -> str:
    """A line of the console in the colours of its kind."""
    found = _STEP.fullmatch(text)
    if found:
        return styled(found[1], "dim") + _TREND.sub(_trend, found[2])
    style = next((style for pattern, style in _STYLES if pattern.fullmatch(text)), None)
    return styled(text, style) if style else text


def _trend(found: re.Match[str]) -> str:
    return found[1] + styled(found[2], "green" if found[2].startswith("(+") else "red")


def plain(text: str) -> str:
    """The text without colours."""
    return _SGR.sub("", text) if "\x1b" in text else text
