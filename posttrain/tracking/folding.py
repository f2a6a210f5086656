"""Notes that are longer than a terminal is wide: broken between words, not in the midst of a setting's name."""

from __future__ import annotations

import textwrap


def folded(text: str, width: int) -> str:
    """The text with its long lines broken, and what follows set in by two columns."""
    return "\n".join(line if len(line) <= width else _broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    edge = " " * (len(line) - len(line.lstrip(" ")) + 2)
    pieces = textwrap.wrap(line, width, subsequent_indent=edge, break_long_words=False, break_on_hyphens=False)
    return "\n".join(pieces)
