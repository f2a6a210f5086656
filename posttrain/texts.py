"""Texts of tokens, and texts that any file can hold.

A Python text may hold half a character: a lone surrogate such as "\\ud800", which JSON can spell and UTF-8 cannot. Rows
of data and what rewards say are mended where they come in, so that no tokenizer, file or terminal meets one later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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


def texts_of(rows: Sequence[Sequence[int]], tokenizer: Any) -> list[str]:
    """The text of each row of tokens, special ones left out: what `batch_decode` gives, which decodes row by row. A
    tokenizer that does nothing to a text afterwards decodes all rows at once, on all cores."""
    from transformers import PreTrainedTokenizerFast

    lists = [list(row) for row in rows]
    plain = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
    if plain and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode_batch(lists, skip_special_tokens=True)
    return tokenizer.batch_decode(lists, skip_special_tokens=True)
