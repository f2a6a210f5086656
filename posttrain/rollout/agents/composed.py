"""A row that an agent puts together itself from what the model wrote, behind whatever it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.rollout.base import Output
from posttrain.rollout.turns.conversation import Conversation


class ChatError(Exception):
    """A call that a conversation cannot follow; the words are for whoever wrote the agent."""


@dataclass(frozen=True)
class Limits:
    """Tokens of a prompt, and of a response with all that the model is told in it."""

    prompt: int
    response: int


def compose(
    conversation: Conversation, limits: Limits, prompt_ids: Sequence[int], ids: Sequence[int], mask: Sequence[int]
) -> None:
    """Makes the conversation that row. What is marked must be among the tokens that the model was asked for, in order:
    their log-probs are those that came with them. What stands behind the model's last words is left out."""
    if len(ids) != len(mask):
        raise ChatError(f"response_ids has {len(ids)} tokens and response_mask {len(mask)} marks")
    if not 0 < len(prompt_ids) <= limits.prompt:
        raise ChatError(f"the prompt has {len(prompt_ids)} tokens (data.max_prompt_length={limits.prompt})")
    marks = [bool(one) for one in mask[: limits.response]]
    if not any(marks):
        raise ChatError("no token of the response is the model's: response_mask is 0 everywhere")
    end = len(marks) - marks[::-1].index(True)
    row, marks = [int(one) for one in ids[:end]], marks[:end]
    places = _places(row, marks, conversation.samples)
    conversation.own_prompt = list(prompt_ids) != list(conversation.prompt_ids)
    conversation.prompt_ids = list(prompt_ids)
    at = 0
    for start, output in places:
        _told(conversation, row[at:start])
        at = min(start + len(output.token_ids), end)
        _written(conversation, output, at - start, marks[start:at])
    found = [*conversation.marks, *[False] * (end - at)]
    if found != marks:
        missing = next(place for place, own in enumerate(marks) if own and not found[place])
        raise ChatError(f"token {missing} of the response is marked as the model's, and no turn of the model has it")


def _places(row: list[int], marks: list[bool], samples: Sequence[Output]) -> list[tuple[int, Output]]:
    """Where in the row each turn of the model begins; turns that are not in it are left out. The last may be cut."""
    found, at = [], 0
    for output in samples:
        ids = output.token_ids
        for start in range(at, len(row)):
            part = row[start : start + len(ids)]
            whole = len(part) == len(ids) or start + len(part) == len(row)
            if whole and part == ids[: len(part)] and any(marks[start : start + len(part)]):
                found.append((start, output))
                at = start + len(part)
                break
    return found


def _told(conversation: Conversation, ids: list[int]) -> None:
    if ids:
        conversation.heard(ids)


def _written(conversation: Conversation, output: Output, count: int, marks: list[bool]) -> None:
    """The first tokens of a turn, of which some may count as told."""
    drawn = output.sampling_log_probs
    conversation.wrote(
        Output(
            output.id,
            list(output.token_ids[:count]),
            np.where(marks, np.asarray(output.log_probs, np.float32)[:count], 0.0),
            output.finish_reason,
            output.versions,  # counted by the marks
            None if drawn is None else np.where(marks, np.asarray(drawn, np.float32)[:count], 0.0),  # pyright: ignore
        ),
        marks,
    )
