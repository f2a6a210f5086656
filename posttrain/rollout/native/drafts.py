"""Drafts of a response's next tokens, by suffix matching: the tokens that followed the same n-gram before.

The n-gram is searched in the response itself, in its prompt, in other responses to that prompt (finished or active),
and in responses of earlier batches if these are kept. The longest match wins, and the newest of several equally long.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

NGRAM_SIZES = (8, 3)  # tokens that must match; the longer n-gram is more specific, so it is tried first
MOST_TOKENS = 2**23  # of finished responses, as int32: 32 MiB of host memory
MOST_TEXTS = 16  # finished responses to one prompt

Ids = tuple[int, ...]


class PromptIndex:
    """An index over one prompt and its responses: where each n-gram occurred last."""

    def __init__(self, prompt: Ids, ended: Sequence[np.ndarray]) -> None:
        self.prompt, self.running = prompt, 0
        self.followed: dict[tuple[int, ...], tuple[list[int], int]] = {}  # n-gram -> (text, position after it)
        self.extend([], prompt)
        for tokens in ended:
            self.extend(list(prompt[-NGRAM_SIZES[0] :]), tokens.tolist())

    def extend(self, text: list[int], tokens: Sequence[int]) -> None:
        """Append these tokens to the text, and add their n-grams."""
        start, followed = len(text), self.followed
        text += tokens
        for size in NGRAM_SIZES:
            for place in range(max(start, size), len(text)):
                followed[tuple(text[place - size : place])] = text, place

    def draft(self, text: list[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow the text; [] if no n-gram matches."""
        for size in NGRAM_SIZES:
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
    """One index for each prompt with active responses, and a bounded number of tokens of finished responses.

    With `keep_across_batches`, finished responses are kept after their batch has ended.
    """

    def __init__(self, *, keep_across_batches: bool) -> None:
        self.keep_across_batches = keep_across_batches
        self.ended: dict[Ids, list[np.ndarray]] = {}  # prompts in the order of their newest response
        self.tokens = 0  # of ended responses
        self.groups: dict[Ids, PromptIndex] = {}
        self.rows: dict[Hashable, tuple[PromptIndex, list[int]]] = {}  # by the request's id

    def open_request(self, id: Hashable, prompt: Sequence[int]) -> tuple[PromptIndex, list[int]]:
        """The index of the request's group, and its text so far (prompt and response); created on the first call."""
        if id not in self.rows:
            ids = tuple(prompt)
            if ids not in self.groups:
                self.groups[ids] = PromptIndex(ids, self.ended.get(ids, ()))
            index = self.groups[ids]
            index.running += 1
            self.rows[id] = index, list(ids)
        return self.rows[id]

    def end(self, id: Hashable, prompt: Sequence[int], tokens: np.ndarray, *, shared: bool) -> None:
        """Remove a finished response. If `shared`, others may have the same prompt, now or in a later batch."""
        index, text = self.rows.pop(id, (None, []))
        if index is not None:
            index.running -= 1
            if index.running:
                index.extend(text, tokens[len(text) - len(index.prompt) :].tolist())
            else:
                del self.groups[index.prompt]
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
        """Forget all requests, and finished responses unless they are kept across batches."""
        self.groups, self.rows = {}, {}
        if not self.keep_across_batches:
            self.ended, self.tokens = {}, 0
