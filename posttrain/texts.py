"""Texts that any file can hold.

A Python text may hold half a character: a lone surrogate such as "\\ud800", which JSON can spell and UTF-8 cannot. Rows
of data and what rewards say are mended where they come in, so that no tokenizer, file or terminal meets one later.
"""

from __future__ import annotations


def well_formed(text: str) -> str:
    """The text with U+FFFD for every lone surrogate; two halves that belong together become their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def utf8(text: str) -> bytes:
    """The text as UTF-8, lone surrogates spelled out (`\\ud800`), as JSON spells them."""
    return text.encode("utf-8", "backslashreplace")
