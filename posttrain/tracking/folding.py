"""Text that is longer than a terminal is wide: broken between words, not in the midst of a setting's name."""

from __future__ import annotations

import re
import sys
import textwrap
from typing import TextIO

from posttrain.tracking.colour import is_terminal
from posttrain.tracking.live import columns

_FULL = 90
"""Columns of a line, at least, that its writer broke because it was full."""


def tell(text: object, stream: TextIO | None = None) -> None:
    """Print an answer of a command: broken between words on a terminal, as it is elsewhere."""
    out: TextIO = stream or sys.stdout
    print(folded(str(text), columns(out)) if is_terminal(out) else text, file=out, flush=True)


def tell_page(text: str) -> None:
    """The same for a page of prose, whose lines have a width of their own: paragraphs are broken anew."""
    width = columns(sys.stdout)
    print(folded(_paragraphs(text), width, hang=0) if is_terminal(sys.stdout) else text, flush=True)


def folded(text: str, width: int, hang: int = 2) -> str:
    """The text with its long lines broken, and what follows set in by `hang` columns."""
    return "\n".join(line if len(line) <= width else _broken(line, width, hang) for line in text.split("\n"))


def _broken(line: str, width: int, hang: int) -> str:
    edge = " " * (len(line) - len(line.lstrip(" ")) + hang)
    pieces = textwrap.wrap(line, width, subsequent_indent=edge, break_long_words=False, break_on_hyphens=False)
    return "\n".join(pieces)


def _paragraphs(text: str) -> str:
    """Paragraphs that were broken at a page's own width as one line each; formulas, lists and tables stay."""
    lines = text.split("\n")
    for place in reversed(range(len(lines) - 1)):
        line, following = lines[place : place + 2]
        if len(line) >= _FULL and re.match(r"\S", line) and re.match(r"[^\s|-]", following):
            lines[place : place + 2] = [f"{line} {following}"]
    return "\n".join(lines)
