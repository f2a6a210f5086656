"""Requests of an engine until their responses are whole: one turn each, or as many as a model calls tools for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from posttrain.conversations.batch import ROW_FIELDS
from posttrain.conversations.conversation import Key
from posttrain.conversations.loop import ConversationLoop
from posttrain.rollout.base import Output, Request, RolloutEngine, Sampling
from posttrain.rollout.generate import advance, until_others_may_join


class Asking:
    """`submit` a prompt, `advance` until some responses are whole. Without `turns` a response has one turn."""

    def __init__(self, engine: RolloutEngine, sampling: Sampling, turns: ConversationLoop | None = None) -> None:
        self.engine, self.sampling, self.turns = engine, sampling, turns
        self._last: dict[Key, Hashable] = {}
        """Of each conversation, the request whose cache its next turn goes on from."""

    def submit(self, key: Key, prompt_ids: list[int], seed: int, row: Mapping[str, Any]) -> None:
        """`row` are the fields of the prompt's row, which may have something for tools or agents."""
        if self.turns is not None:
            if not self.turns.begin(key, prompt_ids, seed, {}, {name: row[name] for name in ROW_FIELDS}):
                return  # its agent asks for the first turn
            self._last[key] = key
        self.engine.submit(Request(key, prompt_ids, self.sampling, seed, keep=self.turns is not None))

    def has_work(self) -> bool:
        return self.engine.has_work() or (self.turns is not None and self.turns.waits())

    def advance(self) -> list[Output]:
        """Whole responses, if there is news of any."""
        if self.turns is None:
            return advance(self.engine)
        others = (until_others_may_join(self.engine),) if self.turns.others_may_join else ()
        outputs = advance(self.engine, *others)
        whole = self.turns.receive(0, outputs)
        at_rest = not self.engine.has_work()
        if at_rest or not self.turns.in_rounds:
            following, full = self.turns.next(wait=at_rest)
            whole += full
            for turn in following.get(0, []):
                turn.submit(self.engine, self.sampling, self._last)
        ended = self.turns.ended().get(0, [])
        self.engine.release([self._last.pop(key) for key in ended])
        return whole
