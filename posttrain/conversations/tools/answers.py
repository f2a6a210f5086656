"""Answers in words: what a function returned as text, errors as one sentence, long texts cut, secrets taken out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain.conversations.tools.base import CallFailed, ToolAnswer
from posttrain.texts import MASK, mask_urls, well_formed

_PATH = re.compile(r"""(['"])(?:~|[A-Za-z]:)?[/\\][^'"]+\1|(?<![\w/:.])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+-]+){2,}[/\\]?""")
_LONGEST = 300


def answer_of(value: Any) -> str | ToolAnswer:
    """What a function returned, for the model: texts as they are, lists and dicts as JSON."""
    if isinstance(value, str | ToolAnswer):
        return value
    if value is None:
        return "(no result)"
    if isinstance(value, list | tuple | dict):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            pass
    return str(value)


def describe_error(error: BaseException) -> str:
    """An error in one line without paths and traceback: `ValueError: no such city`."""
    if isinstance(error, CallFailed):  # these words come from a worker process
        return error.words
    try:
        said = str(error).strip()
    except Exception:
        said = ""
    line = mask_urls(_PATH.sub("(a file)", said.splitlines()[0])) if said else ""
    line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def failure(kind: str, text: str, words: str = "", *, seconds: float = 0.0) -> ToolAnswer:
    """An answer that is an error of this kind: `text` for the model, `words` for us where they say more."""
    return ToolAnswer(text, error=f"{kind}: {words or text}", seconds=seconds)


def cut(text: str, most: int, side: str) -> str:
    """At most `most` characters, and a mark of how many are left out. `left` keeps the beginning, `right` the end,
    `middle` both ends: verl's meaning of `tool_response_truncate_side`."""
    if len(text) <= most:
        return text
    mark = f"[{len(text) - most:,} characters left out]"
    if side == "left":
        return f"{text[:most]}... {mark}"
    if side == "right":
        return f"{mark} ...{text[len(text) - most :]}"
    head = (most + 1) // 2
    return f"{text[:head]}... {mark} ...{text[len(text) - (most - head) :]}"


def presented(answer: ToolAnswer, secrets: Sequence[str], most: int, side: str) -> ToolAnswer:
    """The answer as the model and the samples may have it: no secrets, no half characters, not too long."""
    text = cut(redacted(well_formed(answer.text), secrets), most, side)
    return replace(answer, text=text, error=redacted(well_formed(answer.error), secrets) if answer.error else None)


def redacted(text: str, secrets: Sequence[str]) -> str:
    """The text with every secret masked."""
    for secret in [secrets] if isinstance(secrets, str) else secrets:  # one text is one secret, not its letters
        text = text.replace(secret, MASK) if secret else text
    return text
