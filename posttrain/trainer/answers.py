"""What a response answered, for maj@k: by its reward, or, where that does not say, by how answers usually stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.rewards.answers import read_answer
from posttrain.tracking.validation import answer_of, says_answer


def given_answer(data_source: str | None, response: str, parts: Mapping[str, Any], error: str | None) -> str | None:
    """The answer of one response with its reward's parts; None if there is none, or if it could not be scored."""
    if error is not None or says_answer(parts):
        return answer_of(parts)
    return read_answer(data_source, response)
