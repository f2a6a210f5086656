"""The KV cache of ended requests, kept for the request that continues their conversation.

Clients of chat APIs send the whole conversation with every turn and do not say which request they continue: it is found
by its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from posttrain.conversations.server import Server
from posttrain.conversations.serving.remote import RemoteServer
from posttrain.rollout.base import Output, Request

_BASE, _PRIME = 1_000_003, 2**61 - 1


@dataclass(frozen=True)
class EndedTurn:
    """A prompt with its response, and the prompt's length and hash."""

    ids: list[int]
    prompt: tuple[int, int]

    def common(self, ids: Sequence[int]) -> int:
        pairs = enumerate(zip(self.ids, ids, strict=False))
        return next((place for place, (mine, other) in pairs if mine != other), min(len(self.ids), len(ids)))


class EndedTurns:
    """Ended turns by the id of their request, oldest first; at most `most` tokens of them."""

    def __init__(self, most: int) -> None:
        self.most, self.tokens = most, 0
        self.turns: dict[Hashable, EndedTurn] = {}
        self._by_prompt: dict[tuple[int, int], list[Hashable]] = {}
        self._lengths: Counter[int] = Counter()

    def add(self, id: Hashable, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[Hashable]:
        """Remember a turn; gives those that are too many now."""
        turn = EndedTurn([*prompt_ids, *response_ids], (len(prompt_ids), _hash(prompt_ids)))
        self.turns[id], self.tokens = turn, self.tokens + len(turn.ids)
        self._by_prompt.setdefault(turn.prompt, []).append(id)
        self._lengths[len(prompt_ids)] += 1
        dropped = []
        while self.tokens > self.most:
            dropped.append(next(iter(self.turns)))
            self._remove(dropped[-1])
        return dropped

    def take(self, prompt_ids: Sequence[int]) -> Hashable | None:
        """The turn that this prompt continues, which is forgotten: its blocks become the request's own."""
        # Only a turn whose whole prompt comes back. One that has a mere beginning in common, such as a system prompt,
        # belongs to another conversation, which will need it.
        found = [
            (self.turns[id].common(prompt_ids), id)
            for prompt in self._beginnings(prompt_ids)
            for id in self._by_prompt.get(prompt, ())
        ]
        found = [(common, id) for common, id in found if common >= self.turns[id].prompt[0]]
        if not found:
            return None
        _, id = max(found, key=lambda one: one[0])
        self._remove(id)
        return id

    def _beginnings(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Length and hash of each beginning that is as long as the prompt of a turn."""
        value = 0
        for length, id in enumerate(ids, 1):
            value = (value * _BASE + id + 1) % _PRIME
            if length in self._lengths:
                yield length, value

    def _remove(self, id: Hashable) -> None:
        turn = self.turns.pop(id)
        self.tokens -= len(turn.ids)
        self._by_prompt[turn.prompt].remove(id)
        if not self._by_prompt[turn.prompt]:
            del self._by_prompt[turn.prompt]
        self._lengths[turn.prompt[0]] -= 1
        if not self._lengths[turn.prompt[0]]:
            del self._lengths[turn.prompt[0]]


def _hash(ids: Sequence[int]) -> int:
    value = 0
    for id in ids:
        value = (value * _BASE + id + 1) % _PRIME
    return value


class KeepingServer:
    """A server whose requests continue from the KV cache of the turn before. At most `most` tokens are kept."""

    def __init__(self, server: Server | RemoteServer, most: int) -> None:
        self.server, self.ended = server, EndedTurns(most)

    async def generate(self, request: Request, on_progress: Callable[[Output], None] | None = None) -> Output:
        request = replace(request, parent=self.ended.take(request.prompt_ids), keep=True)
        output = await self.server.generate(request, on_progress)
        for id in self.ended.add(request.id, request.prompt_ids, output.token_ids):
            self.server.release(id)
        return output


def keep_turns(server: Server | RemoteServer, cache_tokens: int) -> Server | RemoteServer | KeepingServer:
    """A server that keeps turns, unless its engine finds them by itself or keeps none. Half of the cache may be kept:
    what runs needs the rest, and an engine that needs more evicts what is kept."""
    return KeepingServer(server, cache_tokens // 2) if cache_tokens else server
