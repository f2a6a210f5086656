"""A turn of a conversation, as a rollout worker is asked for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Key = tuple[Any, int]
"""(uid, sample): a response among those to its prompt."""


def by_rank(conversations: Iterable[tuple[int, Key]]) -> dict[int, list[Key]]:
    """Conversations by the rank that has their turns."""
    found: dict[int, list[Key]] = {}
    for rank, key in conversations:
        found.setdefault(rank, []).append(key)
    return found


@dataclass(frozen=True)
class NextTurn:
    """Goes on from the turn before, whose tokens are the beginning of `prompt_ids`; one that is `fresh` does not."""

    key: Key
    turn: int
    prompt_ids: list[int]
    max_tokens: int
    seed: int
    how: dict[str, bool]
    """`validate`, `greedy`: as the conversation was asked for."""
    stop: tuple[str, ...] = ()
    """Texts that end this turn besides those of the settings."""
    fresh: bool = False

    @property
    def id(self) -> Any:
        return self.key if self.turn == 0 else (*self.key, self.turn)

    @property
    def parent(self) -> Any:
        if self.fresh or self.turn == 0:
            return None
        return self.key if self.turn == 1 else (*self.key, self.turn - 1)
