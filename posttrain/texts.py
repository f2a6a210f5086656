"""Texts of tokens, texts that any file can hold, and tables of text.

A Python text may hold half a character: a lone surrogate such as "\\ud800", which JSON can spell and UTF-8 cannot. Rows
of data and the results of rewards are repaired where they come in, so that no tokenizer, file or terminal meets one.

Masks secrets in every text that is shown or kept: those of addresses (`https://user:pass@host/`) and of settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
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


def common_start(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many tokens, or characters, two sequences have in common before they first differ."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))


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
    """What a model wrote itself of each row of tokens, where its marks are set: a line for each of its turns. Tool
    results and other observations between them are skipped."""
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


def align_columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """The rows of a table as lines. Columns in `left` are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in aligned]


MASK = "***"
_USER = re.compile(r"(?<=://)[^/\s?#]+@")
_QUERY = re.compile(
    r"([?&;][\w.-]*(?:key|token|secret|password|passwd|credentials?|signature|sig|auth)=)[^&\s#;'\"]+", re.IGNORECASE
)


def mask_urls(text: str) -> str:
    """The text with users, passwords and secret parameters of its addresses replaced by `***`."""
    return _QUERY.sub(rf"\1{MASK}", _USER.sub(f"{MASK}@", text)) if "://" in text else text


_SECRET_NAME = re.compile(
    r"(^|[_.-])((api|access)[_-]?key|secret([_-]?key)?|password|passwd|token|credentials?)$", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether a setting or an environment variable of this name holds something that must not be shown."""
    return _SECRET_NAME.search(name) is not None


def redact(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """A copy of `value` in plain dicts and lists, with `***` for secrets.

    Secrets are values under a name like `api_key`, the values of environment variables with such a name
    (`WANDB_API_KEY`, `HF_TOKEN`) inside any text, and users and keys in URLs.
    """
    # Values of fewer than 8 characters are no keys, and replacing them would garble other text.
    values = {text for name, text in environ.items() if is_secret(name) and len(text) >= 8}
    return _redact(value, values)


def _redact(value: Any, secrets: set[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: MASK if isinstance(key, str) and item and is_secret(key) else _redact(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redact(item, secrets) for item in value]
    if isinstance(value, str):
        value = mask_urls(value)
        for secret in secrets:
            value = value.replace(secret, MASK)
    return value
