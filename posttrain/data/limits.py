"""Limit: what happens to rows with too many tokens, and how many there were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.data.rows import DataError


class Limit:
    """Rows of at most `length` tokens. `emptied` counts rows of which nothing was left to learn."""

    def __init__(self, length: int, truncation: str, name: str) -> None:
        self.length, self.truncation, self.name = length, truncation, name
        self.seen = self.overlong = self.longest = self.emptied = 0

    def fit(self, parallel: Sequence[list[Any]], where: str) -> Sequence[list[Any]]:
        """The lists (ids first, all of one length) cut to the limit; empty where the row is dropped."""
        self.seen += 1
        size = len(parallel[0])
        self.longest = max(self.longest, size)
        if size <= self.length:
            return parallel
        self.overlong += 1
        if self.truncation == "error":
            raise DataError(
                f"R{where[1:]} has {size} tokens, more than data.max_length={self.length}. Raise data.max_length, or "
                "set data.truncation=drop, left or right (the side that is cut); the run then says how many there were."
            )
        if self.truncation == "drop":
            return [[] for _ in parallel]
        kept = [part[-self.length :] if self.truncation == "left" else part[: self.length] for part in parallel]
        self.emptied += len(kept) > 1 and not any(kept[1][1:])
        return kept

    def notes(self) -> list[str]:
        if not self.overlong:
            return []
        did = "dropped" if self.truncation == "drop" else f"cut on the {self.truncation}"
        return [
            f"{self.overlong} of {self.seen} {self.name} exceed data.max_length={self.length} tokens and were {did}; "
            f"the longest has {self.longest}."
        ]
