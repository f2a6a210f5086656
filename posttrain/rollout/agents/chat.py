"""A conversation as an agent has it: the model's next turn is awaited, what the model is told is put behind it.

async def play(chat, row):
    while not chat.over:
        guess = await chat.say()               # tokens that the model samples: trained
        if guess.strip() == row["ground_truth"]:
            return 1.0
        chat.tell("Wrong, once more.")         # tokens that it reads: not trained
    return 0.0
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.rollout.agents.composed import ChatError, Limits, compose
from posttrain.rollout.agents.told import Told
from posttrain.rollout.base import Output
from posttrain.rollout.turns.conversation import Conversation
from posttrain.texts import texts_of


class ChatFull(Exception):
    """The response has no room for a further turn; whoever does not catch it ends the conversation."""


@dataclass(frozen=True)
class Ask:
    """A turn that is wanted of the model. What it writes belongs to the conversation's row if it is `kept`."""

    prompt_ids: list[int]
    max_tokens: int
    stop: tuple[str, ...]
    kept: bool


class Chat:
    """One conversation. `messages` and `prompt_ids` are its row's prompt, `facts` what reward functions find in
    `extra_info`, `seed` a number of its own for whatever the agent draws."""

    def __init__(
        self,
        conversation: Conversation,
        messages: Sequence[Any],
        told: Told,
        limits: Limits,
        ask: Callable[[Ask], Awaitable[Output]],
    ) -> None:
        self.messages, self.facts = [dict(one) for one in messages], dict[str, Any]()
        self.seed, self.validate = conversation.seed, bool(conversation.how.get("validate"))
        self.tokenizer, self.limits = told.tokenizer, limits
        self.last: Output | None = None
        """The model's last turn: `token_ids`, `log_probs`, `finish_reason`."""
        self._conversation, self._told, self._ask = conversation, told, ask
        self._messages: list[dict[str, Any]] = []
        self._raw: list[int] = []
        self._heard: list[int] | None = None
        self._asking = False

    @property
    def prompt_ids(self) -> list[int]:
        return list(self._conversation.prompt_ids)

    @property
    def ids(self) -> list[int]:
        """Everything so far, the prompt in front; what was told since the model's last turn is not in it yet."""
        return self._conversation.ids

    @property
    def turns(self) -> int:
        """Turns that the model has had."""
        return self._conversation.turns

    @property
    def room(self) -> int:
        """Tokens that the model's next turn may have; data.max_response_length is for all turns and all it is told."""
        return max(0, self.limits.response - self._conversation.length - len(self._new()))

    @property
    def over(self) -> bool:
        """Whether there is no room for a further turn."""
        return self.room < 1

    def start(self, messages: Sequence[Any], tools: Any = None) -> None:
        """Another prompt than the row's, before the model's first turn."""
        if self.turns or self._asking or self._raw:
            raise ChatError("chat.start: the conversation has begun; chat.tell puts messages behind it")
        ids = self._told.prompt(messages, tools)
        if len(ids) > self.limits.prompt:
            most = f"data.max_prompt_length={self.limits.prompt}"
            raise ChatError(f"chat.start: the prompt has {len(ids)} tokens ({most})")
        self.messages = [dict(one) for one in messages]
        self._conversation.prompt_ids, self._conversation.own_prompt = ids, True

    def tell(self, text: str, role: str = "user") -> None:
        """A message that the model reads before its next turn: of the user, or of a tool (`role="tool"`)."""
        if not isinstance(text, str):
            raise ChatError(f"chat.tell: a text is told, not a {type(text).__name__}")
        if not self.turns:
            raise ChatError("chat.tell: the model has not spoken yet; chat.start(messages) makes another prompt")
        if self._raw:
            raise ChatError("chat.tell: messages come before token ids")
        self._messages.append({"role": role, "content": text})
        self._heard = None

    def tell_ids(self, ids: Sequence[int]) -> None:
        """Token ids that the model reads before its next turn, as they are: behind messages they begin that turn."""
        self._raw += [int(one) for one in ids]
        self._heard = None

    async def say(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> str:
        """The model's next turn as text; ChatFull where there is no room for one. `max_tokens` and `stop` end it
        earlier."""
        heard, room = self._new(), self.room
        if room < 1:
            self._conversation.full = True
            raise ChatFull("the response has no room for a further turn (data.max_response_length)")
        if not heard and self.turns and self._conversation.ids[-1] in self.tokenizer.all_special_ids:
            raise ChatError("chat.say: the model has ended its turn, and was told nothing since (chat.tell)")
        self._conversation.heard(heard)
        self._messages, self._raw, self._heard = [], [], None
        wanted = Ask(self._conversation.ids, min(room, max_tokens or room), _texts(stop), kept=True)
        return texts_of([(await self._asked(wanted)).token_ids], self.tokenizer)[0]

    async def sample(
        self, prompt_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Output:
        """What the model writes behind any tokens. It is no part of the conversation."""
        room = min(self.limits.response, self.limits.prompt + self.limits.response - len(prompt_ids))
        if room < 1:
            raise ChatFull(f"a prompt of {len(prompt_ids)} tokens leaves no room (data.max_response_length)")
        return await self._asked(Ask(list(prompt_ids), min(room, max_tokens or room), _texts(stop), kept=False))

    def compose(self, prompt_ids: Sequence[int], ids: Sequence[int], mask: Sequence[int]) -> None:
        """The whole row from what `sample` gave: `mask` is 1 where the model wrote a token."""
        compose(self._conversation, self.limits, prompt_ids, ids, mask)

    async def _asked(self, wanted: Ask) -> Output:
        if self._asking:
            raise ChatError("the model's turn is still under way: one at a time is awaited in a conversation")
        self._asking = True  # and stays so where the turn is given up: what it wrote is not known then
        self.last = await self._ask(wanted)
        self._asking = False
        return self.last

    def _new(self) -> list[int]:
        """What was told since the model's last turn, as tokens."""
        if self._heard is None:
            shown = self._told.ids(self._messages, self._conversation.ids[-1]) if self._messages else []
            self._heard = [*shown, *self._raw]
        return self._heard


def _texts(stop: Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)
