"""Texts of tokens, and texts that any file can hold.

A Python text may hold half a character: a lone surrogate such as "\\ud800", which JSON can spell and UTF-8 cannot. Rows
of data and what rewards say are mended where they come in, so that no tokenizer, file or terminal meets one later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
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


def own_words(rows: Sequence[Sequence[int]], marks: Sequence[Sequence[Any]], tokenizer: Any) -> list[str]:
    """What a model wrote itself of each row of tokens, where its marks are set: a line for each of its turns. What it
    was told between them is left out."""
    return ["\n".join(turns) for turns in own_turns(rows, marks, tokenizer)]


def own_turns(rows: Sequence[Sequence[int]], marks: Sequence[Sequence[Any]], tokenizer: Any) -> list[list[str]]:
    """The same, turn by turn."""
    turns = [_marked(row, mark) for row, mark in zip(rows, marks, strict=True)]
    texts = iter(texts_of([turn for row in turns for turn in row], tokenizer))
    return [[next(texts) for _ in row] for row in turns]


def _marked(row: Sequence[int], marks: Sequence[Any]) -> list[list[int]]:
    """The stretches of a row that are marked."""
    stretches = groupby(zip(row, marks, strict=True), lambda one: bool(one[1]))
    return [[token for token, _ in stretch] for own, stretch in stretches if own]
