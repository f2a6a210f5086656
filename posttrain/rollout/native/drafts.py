"""Drafts of a response's next tokens, by suffix matching: what followed the same few tokens before.

They are looked up in the response itself, in its prompt, in other responses to that prompt (ended or under way), and in
responses of earlier batches where these are kept. Where several places match, the newest of the longest match counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

SIZES = (8, 3)  # tokens that must match, longest first: 8 tell places apart that 3 confuse
MOST_TOKENS = 2**23  # of ended responses, as int32: 32 MiB of host memory
MOST_TEXTS = 16  # ended responses to one prompt

Ids = tuple[int, ...]


class Texts:
    """What was written after one prompt, and where each run of tokens occurred last."""

    def __init__(self, prompt: Ids, ended: Sequence[np.ndarray]) -> None:
        self.prompt, self.running = prompt, 0
        self.followed: dict[tuple[int, ...], tuple[list[int], int]] = {}  # tokens -> (text, where it goes on)
        self.extend([], prompt)
        for tokens in ended:
            self.extend(list(prompt[-SIZES[0] :]), tokens.tolist())

    def extend(self, text: list[int], tokens: Sequence[int]) -> None:
        """The text goes on with these tokens."""
        start, followed = len(text), self.followed
        text += tokens
        for size in SIZES:
            for place in range(max(start, size), len(text)):
                followed[tuple(text[place - size : place])] = text, place

    def draft(self, text: list[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow the text."""
        for size in SIZES:
            found = self.followed.get(tuple(text[-size:])) if len(text) >= size else None
            if found is None:
                continue
            source, place = found
            tokens = source[place : place + most]
            if source is text:  # it repeats itself with this period, and may do so again
                period = len(text) - place
                while len(tokens) < most:
                    tokens.append(tokens[-period])
            return tokens
        return []


class Drafts:
    """Texts of the prompts that have running responses, and tokens of ended ones within bounds.

    With `keeps_epochs` ended responses outlive their batch.
    """

    def __init__(self, *, keeps_epochs: bool) -> None:
        self.keeps_epochs = keeps_epochs
        self.ended: dict[Ids, list[np.ndarray]] = {}  # prompts in the order of their newest response
        self.tokens = 0  # of ended responses
        self.groups: dict[Ids, Texts] = {}
        self.rows: dict[Hashable, tuple[Texts, list[int]]] = {}  # by the request's id: where its text is looked up

    def text_of(self, id: Hashable, prompt: Sequence[int]) -> tuple[Texts, list[int]]:
        """The texts to look a response up in, and its own with the prompt in front."""
        if id not in self.rows:
            ids = tuple(prompt)
            if ids not in self.groups:
                self.groups[ids] = Texts(ids, self.ended.get(ids, ()))
            texts = self.groups[ids]
            texts.running += 1
            self.rows[id] = texts, list(ids)
        return self.rows[id]

    def end(self, id: Hashable, prompt: Sequence[int], tokens: np.ndarray, *, shared: bool) -> None:
        """A response has ended. If `shared`, others may have the same prompt, now or in a later batch."""
        texts, text = self.rows.pop(id, (None, []))
        if texts is not None:
            texts.running -= 1
            if texts.running:
                texts.extend(text, tokens[len(text) - len(texts.prompt) :].tolist())
            else:
                del self.groups[texts.prompt]
        if shared:
            self._keep(tuple(prompt), tokens.astype(np.int32))

    def _keep(self, ids: Ids, tokens: np.ndarray) -> None:
        held = self.ended.pop(ids, [])
        self.ended[ids] = [*held, tokens][-MOST_TEXTS:]
        self.tokens += len(tokens) - (len(held[0]) if len(held) == MOST_TEXTS else 0)
        while self.tokens > MOST_TOKENS:
            oldest = next(iter(self.ended))
            self.tokens -= sum(map(len, self.ended.pop(oldest)))

    def end_batch(self) -> None:
        """No request is left."""
        self.groups, self.rows = {}, {}
        if not self.keeps_epochs:
            self.ended, self.tokens = {}, 0
