"""The loop over agents, above any rollout engine. It is called as the loop over tools is (`turns/loop.py`):

    agents.begin(...)             conversations, each led by its agent
    agents.next(wait)             turns that agents want of the model, and responses that are whole
    agents.took(rank, outputs)    the model's turns: agents go on with them

With `in_rounds` turns are asked for together, when every agent has asked or ended and all engines are at rest: what is
computed side by side then does not depend on how long an environment took, and a run can be repeated to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.rollout.agents.chat import Ask, Chat
from posttrain.rollout.agents.composed import Limits
from posttrain.rollout.agents.runner import AgentRunner, Ended
from posttrain.rollout.agents.told import Told
from posttrain.rollout.base import Output
from posttrain.rollout.sampling import combine_seeds
from posttrain.rollout.turns.conversation import Conversation
from posttrain.rollout.turns.next_turn import Key, NextTurn, by_rank

Lead = Callable[[Chat, dict[str, Any]], Any]
"""An agent: `await lead(chat, row)` leads one conversation, and gives its reward or None."""


class Agents:
    """The conversations of a run. `leads` gives the agent of a row."""

    asks_first = True
    schemas: Sequence[Any] = ()

    def __init__(
        self,
        leads: Callable[[Mapping[str, Any]], Lead],
        tokenizer: Any,
        runner: AgentRunner,
        *,
        limits: Limits,
        template_kwargs: dict[str, Any],
        in_rounds: bool,
    ) -> None:
        self.leads, self.tokenizer, self.runner = leads, tokenizer, runner
        self.limits, self.in_rounds = limits, in_rounds
        self.told = Told(tokenizer, template_kwargs)
        self._open: dict[Key, Conversation] = {}
        self._chats: dict[Key, Chat] = {}
        self._asked: dict[Key, Ask] = {}
        """Turns that the model is at."""
        self._requests: dict[Key, int] = {}
        self._events: dict[Any, Ask | Ended] = {}
        self._ended: list[tuple[int, Key]] = []
        self.records: dict[Key, Conversation] = {}
        """Of whole responses, until somebody takes them."""

    def begin(
        self,
        key: Key,
        prompt_ids: Sequence[int],
        seed: int,
        how: dict[str, bool],
        row: Mapping[str, Any],
        rank: int = 0,
    ) -> None:
        """A conversation, whose agent begins at once."""
        lead, own = self.leads(row), dict(row)
        conversation = self._open[key] = Conversation(key, list(prompt_ids), seed, how, rank)
        chat = Chat(conversation, own.get("raw_prompt") or (), self.told, self.limits, self.runner.ask_of(key))
        own |= {"uid": key[0], "sample": key[1]}
        self._chats[key], self._requests[key] = chat, 0
        self.runner.start(key, lambda: lead(chat, own))

    def took(self, rank: int, outputs: Sequence[Output]) -> list[Output]:
        """The model's turns. Gives responses whose agents had ended before the turn that they asked for."""
        whole = []
        for output in outputs:
            key: Key = output.id[:2]  # pyright: ignore (a request of a later turn has its number behind)
            ask, conversation = self._asked.pop(key), self._open[key]
            conversation.before = [*ask.prompt_ids, *output.token_ids]
            if ask.kept:
                conversation.wrote(output)
            else:
                conversation.samples.append(output)
            ended = self._events.get(key)
            if isinstance(ended, Ended):
                del self._events[key]
                whole.append(self._end(key, ended))
            else:
                self.runner.give(key, output)
        return whole

    def waits(self) -> bool:
        """Whether an agent is being waited for."""
        return bool(self._open)

    def next(self, *, wait: bool) -> tuple[dict[int, list[NextTurn]], list[Output]]:
        """(by rank, the turns that come next; responses that are whole). With `wait`, at least one conversation goes
        on."""
        self._events |= self.runner.poll()
        while wait and self._must_wait():
            self._events |= self.runner.wait()
        following: dict[int, list[NextTurn]] = {}
        whole = []
        for key in [key for key in self._open if key in self._events and key not in self._asked]:
            event = self._events.pop(key)
            if isinstance(event, Ended):
                whole.append(self._end(key, event))
            else:
                following.setdefault(self._open[key].rank, []).append(self._turn(key, event))
        return following, whole

    def _must_wait(self) -> bool:
        thinking = [key for key in self._open if key not in self._asked]
        if self.in_rounds:
            return any(key not in self._events for key in thinking)
        return bool(thinking) and not any(key in self._events for key in thinking)

    def _turn(self, key: Key, ask: Ask) -> NextTurn:
        conversation, number = self._open[key], self._requests[key]
        self._asked[key], self._requests[key] = ask, number + 1
        seed = combine_seeds(conversation.seed, number) if number else conversation.seed
        fresh = ask.prompt_ids[: len(conversation.before)] != conversation.before
        return NextTurn(key, number, ask.prompt_ids, ask.max_tokens, seed, conversation.how, ask.stop, fresh)

    def _end(self, key: Key, ended: Ended) -> Output:
        conversation, chat = self._open.pop(key), self._chats.pop(key)
        conversation.facts, conversation.score, conversation.error = dict(chat.facts), ended.value, ended.error
        if self._requests.pop(key):
            self._ended.append((conversation.rank, key))
        if not conversation.length and ended.error is None:
            conversation.error = "it ended before the model had said anything"
        self.records[key] = conversation
        reason = "error" if conversation.error else "length" if conversation.full else conversation.finish_reason
        if not conversation.length:  # a row has a token: one that nobody wrote
            conversation.heard([self.tokenizer.eos_token_id or 0])
        return conversation.output(reason)

    def ended(self) -> dict[int, list[Key]]:
        """By rank, conversations that have ended since the last call."""
        ended, self._ended = self._ended, []
        return by_rank(ended)
