"""A further turn of a conversation, as a rollout worker is asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Key = tuple[Any, int]
"""(uid, sample): a response among those to its prompt."""


@dataclass(frozen=True)
class NextTurn:
    """Goes on from the turn before, whose tokens are the beginning of `prompt_ids`."""

    key: Key
    turn: int
    prompt_ids: list[int]
    max_tokens: int
    seed: int
    how: dict[str, bool]
    """`validate`, `greedy`: as the conversation was asked for."""

    @property
    def id(self) -> Any:
        return (*self.key, self.turn)

    @property
    def parent(self) -> Any:
        return self.key if self.turn == 1 else (*self.key, self.turn - 1)
