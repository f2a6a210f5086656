"""Matches the messages that a client sends to the turns that were sampled for it, so that these keep their token ids.

A client sends its whole history with every request, as messages. What matches a sampled turn stands for its tokens;
what is new behind it is rendered as observation tokens, as the built-in loop does. A client that changed its history
(compaction, an edited turn), or that begins another one (a sub-agent), gets a prompt of its own: a branch. Nothing that
was sampled is tokenized again, unless a client changed it.

Clients drop thinking, spell JSON arguments anew, and write null for "" or leave keys out: none of that is a change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.conversations.serving.model import Prompt, ServedModel
from posttrain.conversations.serving.requests import Answer, Choice, Message, ModelRequest, count_calls
from posttrain.conversations.templates import NoTemplate
from posttrain.conversations.thinking import Span

MessageKey = tuple[str, str, str]
"""Role, text, and calls as JSON."""


@dataclass(eq=False)
class SampledTurn:
    """A turn of the model: the messages that it read since the turn before, its own, and all tokens up to its end."""

    parent: SampledTurn | None
    read: list[MessageKey]
    written: MessageKey
    call_ids: list[str]
    ids: list[int]
    choice: Choice
    thoughtful: list[Span]
    """This turn, and those before it in `ids`, whose thinking was not dropped."""
    following: list[SampledTurn] = field(default_factory=list)
    taken: bool = False
    """Whether a later request continues it."""
    delivered: bool = False


@dataclass(eq=False)
class _Place:
    """Where in the ledger a prompt stands: behind which turn, in which list of turns, and what was read since."""

    parent: SampledTurn | None
    beside: list[SampledTurn]
    read: list[MessageKey]
    thoughtful: list[Span] = field(default_factory=list)
    """Turns in the prompt whose thinking was not dropped."""
    made: list[SampledTurn] = field(default_factory=list)


class Ledger:
    """The turns of one session. `continued`, `opened` and `changed` count requests: behind a sampled turn, with a
    history of their own, and with a history in which a sampled turn was changed."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.continued = self.opened = self.changed = 0
        # By tools and template options, which a prompt begins with.
        self._roots: dict[str, list[SampledTurn]] = {}
        self._places: list[_Place] = []
        self._turns: dict[int, SampledTurn] = {}  # by the ids of their choices, which they hold

    def prompt(self, request: ModelRequest, render: Callable[[], list[int]]) -> Prompt:
        """The tokens of a request's messages. `render` makes them by the chat template, for those without a match."""
        keys = [message_key(message) for message in request.messages]
        context = json.dumps([request.tools, request.template_options], sort_keys=True, default=str)
        roots = self._roots.setdefault(context, [])
        turn, end = self._find(request, roots, keys)
        rest = request.messages[end:]
        if turn is not None and rest and all(message["role"] != "assistant" for message in rest):
            ids = self._behind(turn, rest, request, end)
            if ids is not None:
                turn.taken = True
                self.continued += 1
                before, thoughtful = self._history(turn, rest)
                return self._note(Prompt([*before, *ids], _Place(turn, turn.following, keys[end:], thoughtful)))
        self.opened += 1
        known = {root.read[0] for root in roots if root.read}
        self.changed += bool(keys and keys[0] in known and any(one["role"] == "assistant" for one in request.messages))
        return self._note(Prompt(render(), _Place(None, roots, keys)))

    def _note(self, prompt: Prompt) -> Prompt:
        self._places.append(prompt.before)
        return prompt

    def _history(self, turn: SampledTurn, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
        """All tokens up to a turn's end before these messages, and the turns in them whose thinking is there."""
        thinking = self.model.thinking
        if thinking is None or not any(thinking.drops_before(one["role"]) for one in messages):
            return turn.ids, turn.thoughtful
        return thinking.drop(turn.ids, turn.thoughtful), []

    def _behind(
        self, turn: SampledTurn, messages: Sequence[Message], request: ModelRequest, end: int
    ) -> list[int] | None:
        """The messages of a request from the `end`-th on, behind a turn, as tokens; None if the template cannot put
        them there. Clients may have given the turn's calls other ids."""
        before = request.messages[:end]
        sent = [call["id"] for call in before[-1].get("tool_calls") or ()]
        own = dict(zip(sent, turn.call_ids, strict=True))
        shown = [_with_id(one, own.get(one.get("tool_call_id"))) if one["role"] == "tool" else one for one in messages]
        try:
            return self.model.template_of(request).ids(shown, turn.ids[-1], count_calls(before[:-1]))
        except (NoTemplate, ValueError):
            return None

    def _find(
        self, request: ModelRequest, roots: list[SampledTurn], keys: list[MessageKey]
    ) -> tuple[SampledTurn | None, int]:
        """(the last turn that the messages begin with, the number of messages up to its end)."""
        found, end, turns = None, 0, roots
        while True:
            matching = []
            for turn in turns:
                place = end + len(turn.read)
                if place < len(keys) and keys[end:place] == turn.read and keys[place] == turn.written:
                    matching.append((turn, place))
            if not matching:
                return found, end
            # Of several equal candidates the ids of their tool calls say which was taken; else it is the first.
            sent = [call["id"] for call in request.messages[matching[0][1]].get("tool_calls") or ()]
            found, place = next((one for one in matching if one[0].call_ids == sent), matching[0])
            end, turns = place + 1, found.following

    def add(self, prompt: Prompt, request: ModelRequest, choice: Choice) -> None:
        """Remembers a sampled turn. Prompts that are no messages have no place here."""
        place = prompt.before
        if place is None:
            return
        ids = [*prompt.ids, *choice.output.token_ids]
        written, thoughtful = message_key(choice.turn.message()), [*place.thoughtful, (len(prompt.ids), len(ids))]
        turn = SampledTurn(place.parent, place.read, written, list(choice.turn.call_ids), ids, choice, thoughtful)
        place.beside.append(turn)
        place.made.append(turn)
        self._turns[id(choice)] = turn

    def deliver(self, answer: Answer) -> None:
        """A client has got this answer."""
        for choice in answer.choices:
            if (turn := self._turns.get(id(choice))) is not None:
                turn.delivered = True

    def unused(self) -> list[SampledTurn]:
        """Turns without a consequence: no client got them, or another candidate of the same request was taken."""
        return [
            turn
            for place in self._places
            for turn in place.made
            if not turn.delivered or (not turn.taken and any(other.taken for other in place.made))
        ]


def _with_id(result: Message, id: str | None) -> Message:
    rest = {key: value for key, value in result.items() if key != "tool_call_id"}
    return {**rest, "tool_call_id": id} if id else rest


def message_key(message: Message) -> MessageKey:
    """Equal for messages that say the same: without thinking, ids and names, arguments as parsed JSON."""
    calls = [[one["function"]["name"], one["function"]["arguments"]] for one in message.get("tool_calls") or ()]
    return message["role"], message.get("content") or "", json.dumps(calls, sort_keys=True) if calls else ""
