"""What a response answered, where the reward does not say it (no part `pred`): read as answers usually stand."""

from __future__ import annotations

from posttrain.rewards.answers import extract_final_answer
from posttrain.rewards.programs import is_code
from posttrain.rewards.scorers import canonical_source

_WHOLE = ("qa", "trivia", "classification")
"""Sources whose responses are the answer."""


def read_answer(data_source: str | None, response: str) -> str | None:
    """The answer, or None: there is none to be found, or the response is a program."""
    if is_code(data_source):
        return None
    if canonical_source(str(data_source)) in _WHOLE:
        return response.strip() or None
    return extract_final_answer(response)
