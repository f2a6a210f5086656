"""The loop over turns, above any rollout engine: a turn that calls tools is answered, and the model goes on.

    turns.begin(...)             conversations whose first turn was asked for
    turns.took(rank, outputs)    turns that ended: gives the responses that are whole; the others' calls go to the tools
    turns.next(wait)             what has been answered meanwhile, as the turns that come next

Nothing here waits for an engine, and no engine waits for a tool: conversations go on as their answers come. With
`in_rounds` they go on together, when all tools have answered and all engines are at rest: what is computed side by side
then does not depend on how long a tool took, and a run can be repeated to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.config.turns import TurnSettings
from posttrain.rollout.base import Output
from posttrain.rollout.sampling import combine_seeds
from posttrain.rollout.tools.base import ToolAnswer, ToolCall
from posttrain.rollout.tools.runner import ToolRunner
from posttrain.rollout.turns.calls import FORMATS, Unreadable
from posttrain.rollout.turns.conversation import Conversation
from posttrain.rollout.turns.next_turn import Key, NextTurn, by_rank
from posttrain.rollout.turns.replies import Replies

Row = Mapping[str, Any]
"""A row's fields, by name: `extra_info`, and others as they are there."""


class Turns:
    """The conversations of a run."""

    asks_first = False
    """Whether a conversation asks for its first turn itself; otherwise it is that of the prompt, asked for with it."""

    def __init__(
        self,
        config: TurnSettings,
        tokenizer: Any,
        runner: ToolRunner,
        *,
        max_response_length: int,
        template_kwargs: dict[str, Any],
        in_rounds: bool,
    ) -> None:
        self.config, self.tokenizer, self.runner = config, tokenizer, runner
        self.limit, self.in_rounds = max_response_length, in_rounds
        self.read_calls, self.replies = FORMATS[config.format], Replies(tokenizer, template_kwargs)
        self._open: dict[Key, Conversation] = {}
        self._asked: dict[Key, list[ToolCall | Unreadable]] = {}
        self._answered: list[tuple[Key, list[ToolAnswer]]] = []
        self._ended: list[tuple[int, Key]] = []
        self.records: dict[Key, Conversation] = {}
        """Of whole responses, until somebody takes them."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of the tools, as chat templates show them."""
        return [tool.schema for tool in self.runner.tools.values()]

    def begin(
        self, key: Key, prompt_ids: Sequence[int], seed: int, how: dict[str, bool], row: Row, rank: int = 0
    ) -> None:
        """A conversation whose first request is `key`; its row may have something for tools."""
        self._open[key] = Conversation(key, prompt_ids, seed, how)
        self.runner.open(key, given_by(row.get("extra_info")))

    def took(self, rank: int, outputs: Sequence[Output]) -> list[Output]:
        """Whole responses among what a rank has ended; calls of the others are being answered."""
        whole = []
        texts = self.tokenizer.batch_decode([output.token_ids for output in outputs], skip_special_tokens=False)
        for output, text in zip(outputs, texts, strict=True):
            conversation = self._open[output.id[:2]]  # pyright: ignore (a request of a later turn has its number behind)
            conversation.rank = rank
            conversation.wrote(output)
            calls = self.read_calls(text) if output.finish_reason == "stop" else []
            if not calls:
                whole.append(self._end(conversation, output.finish_reason))
            elif conversation.turns >= (self.config.max_assistant_turns or conversation.turns + 1):
                whole.append(self._end(conversation, "turns"))
            else:
                self._ask(conversation, calls)
        return whole

    def _ask(self, conversation: Conversation, calls: list[ToolCall | Unreadable]) -> None:
        self._asked[conversation.key] = calls
        able = [call for call in calls[: self.config.max_parallel_calls] if isinstance(call, ToolCall)]
        if able:
            self.runner.submit(conversation.key, able)
        else:
            self._answered.append((conversation.key, []))

    def waits(self) -> bool:
        """Whether a tool is being waited for."""
        return bool(self._asked)

    def next(self, *, wait: bool) -> tuple[dict[int, list[NextTurn]], list[Output]]:
        """(by rank, the turns that come next; responses that have no room for what a tool said). With `wait`, at least
        one conversation goes on."""
        if not self._asked:
            return {}, []
        answered: list[tuple[Any, list[ToolAnswer]]] = self._answered
        self._answered = []
        answered += self.runner.poll()
        while wait and len(answered) < (len(self._asked) if self.in_rounds else 1):
            answered += self.runner.wait()
        if self.in_rounds:
            order = {key: number for number, key in enumerate(self._asked)}
            answered.sort(key=lambda one: order[one[0]])
        following: dict[int, list[NextTurn]] = {}
        full = []
        for key, answers in answered:
            conversation = self._open[key]
            turn = self._go_on(conversation, self._joined(conversation, self._asked.pop(key), answers))
            if turn is None:
                full.append(self._end(conversation, "length"))
            else:
                following.setdefault(conversation.rank, []).append(turn)
        return following, full

    def _joined(
        self, conversation: Conversation, calls: list[ToolCall | Unreadable], answers: list[ToolAnswer]
    ) -> list[str]:
        """What the model is told: an answer for each call in order, those that no tool saw among them."""
        given, told = iter(answers), []
        for number, call in enumerate(calls):
            if number >= self.config.max_parallel_calls:
                told.append(f"Only {self.config.max_parallel_calls} call(s) in a turn are answered; this one was not.")
                continue
            answer = ToolAnswer(str(call), error="unreadable") if isinstance(call, Unreadable) else next(given)
            conversation.reward += answer.reward
            conversation.calls.append(
                {
                    "turn": conversation.turns,
                    "name": None if isinstance(call, Unreadable) else call.name,
                    "arguments": None if isinstance(call, Unreadable) else call.arguments,
                    "answer": answer.text,
                    "error": answer.error,
                }
            )
            conversation.tool_seconds += answer.seconds
            told.append(answer.text)
        return told

    def _go_on(self, conversation: Conversation, told: list[str]) -> NextTurn | None:
        """The next turn; None where the response has no room for what was said and a word of the model's."""
        left = self.limit - conversation.length
        if left <= len(told):  # an answer has a token at least: thousands of calls are not rendered for nothing
            return None
        reply = self.replies.ids(told, conversation.ids[-1])
        room = left - len(reply)
        if room < 1:
            return None
        conversation.heard(reply)
        seed = combine_seeds(conversation.seed, conversation.turns)
        return NextTurn(conversation.key, conversation.turns, conversation.ids, room, seed, conversation.how)

    def _end(self, conversation: Conversation, finish_reason: str) -> Output:
        del self._open[conversation.key]
        conversation.reward += self.runner.reward(conversation.key)
        self.runner.close_conversation(conversation.key)
        self._ended.append((conversation.rank, conversation.key))
        self.records[conversation.key] = conversation
        return conversation.output(finish_reason)

    def ended(self) -> dict[int, list[Key]]:
        """By rank, conversations that have ended since the last call."""
        ended, self._ended = self._ended, []
        return by_rank(ended)


def given_by(info: Any) -> dict[str, Any]:
    """What a row's `extra_info` has for its tools, by their names."""
    asked = info.get("tools_kwargs") if isinstance(info, dict) else None
    if not isinstance(asked, dict):
        return {}
    return {name: (own or {}).get("create_kwargs") or {} for name, own in asked.items()}
