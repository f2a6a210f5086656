"""A conversation as an agent sees it: it awaits the model's next turn, and tells the model what to read before it.

async def play(chat, row):
    while not chat.over:
        guess = await chat.say()               # tokens that the model samples: trained
        if guess.strip() == row["ground_truth"]:
            return 1.0
        chat.tell("Wrong, once more.")         # tokens that it reads: not trained
    return 0.0

`chat.branch` opens a second context beside this one (a sub-agent, another attempt), and `chat.compact` continues this
one behind other messages. Both start a further row of the same sample. `run_to_end` says how an agent ended.
"""

from __future__ import annotations

import asyncio
import math
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.conversations.branch import Branch
from posttrain.conversations.conversation import ChatError, Conversation, Limits, TooManyRows
from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, open_thinking
from posttrain.conversations.settings import TurnSettings
from posttrain.conversations.templates import MessageTemplate
from posttrain.conversations.thinking import EarlierThinking, Span
from posttrain.conversations.tools.base import ToolAnswer, ToolCall, describe_error
from posttrain.rollout.base import Output
from posttrain.texts import texts_of, well_formed

_OPENING = 32  # tokens at the end of a prompt that show whether it opens the model's thinking
_LONGEST_NAME = 80  # a model may invent a tool's name, and the template shows it


class ChatFull(Exception):
    """There may be no further turn. An agent that does not catch it ends its conversation."""


NO_TURN = {
    "length": "the response has no room for a further turn (data.max_response_length)",
    "tool_time": "the tools of the conversation have taken all the time that they may (multi_turn.max_tool_seconds)",
    "tool_cost": "the tool calls of the conversation have cost all that they may (multi_turn.max_tool_cost)",
    "rows": "the sample has as many rows as it may (agent.max_rows), and a further turn would begin another one",
}
"""Limits that allow no further turn, by the finish reasons of responses that end by them."""


@dataclass(frozen=True)
class Generate:
    """A turn that an agent wants of the model; its tokens join a branch of the conversation if `kept`."""

    prompt_ids: list[int]
    max_tokens: int
    stop: tuple[str, ...]
    kept: bool
    branch: int | None = 0
    """None: the branch that the prompt continues, or a further one, is found when the turn is admitted."""
    on_progress: Callable[[Output], None] | None = None
    """Called with what the turn has so far, while it is sampled."""


@dataclass(frozen=True)
class Pause:
    """What an agent waits for before its own time begins."""

    until: Awaitable[Any]


Ask = Callable[[Generate | list[ToolCall] | Pause], Awaitable[Any]]
"""How an agent asks for a turn (an Output) or for tool calls (their ToolAnswers), wherever it runs (`runner.py`)."""
Settle = Callable[[Output | Exception], None]
"""Takes a turn that was asked for, or why there is none."""
OwnAnswer = Callable[[ToolCall], Awaitable[ToolAnswer | None]]
"""Answers calls of tools that an agent has itself; None for one of the run's tools."""


@dataclass(frozen=True)
class Setup:
    """What all conversations of a run share."""

    template: MessageTemplate
    limits: Limits
    settings: TurnSettings
    schemas: Sequence[dict[str, Any]] = ()
    thinking: EarlierThinking | None = None
    """Drops the thinking of earlier turns; None where it stays in the history."""


class Chat:
    """One context of a conversation. `messages` and `prompt_ids` are its prompt (at first its row's), `seed` a number
    of its own for random choices of the agent, `tools` the schemas of the run's tools."""

    def __init__(
        self,
        conversation: Conversation,
        messages: Sequence[Any],
        setup: Setup,
        ask: Ask,
        request: Callable[[Generate, Settle], None] | None = None,
    ) -> None:
        self.messages = [dict(one) for one in messages]
        self.seed, self.validate = conversation.seed, bool(conversation.how.get("validate"))
        self.tokenizer, self.limits, self.tools = setup.template.tokenizer, setup.limits, list(setup.schemas)
        self.last: Output | None = None
        """The model's last turn: `token_ids`, `log_probs`, `finish_reason`."""
        self._conversation, self._branch, self._ask = conversation, conversation.main, ask
        self._request = request
        self._setup, self._template, self._settings = setup, setup.template, setup.settings
        self._messages: list[dict[str, Any]] = []
        self._ids: list[int] = []
        self._observation: list[int] | None = None
        self._answered = 0  # tool calls of earlier turns in this context
        self._thoughtful: list[Span] = []  # turns of this context whose thinking was not dropped
        self._last_token: int | None = None  # of the model's last turn, where no token of it is left
        self._blocked = ""  # the limit that allows this context no further turn
        self._generating = False
        self._opening_ids: Sequence[int] = ()
        # Shared by all branches: the engine is asked for one turn of a conversation at a time.
        self._turn = asyncio.Lock()

    @property
    def conversation(self) -> Conversation:
        return self._conversation

    @property
    def settings(self) -> TurnSettings:
        """The run's settings of turns and tools (rollout.multi_turn)."""
        return self._settings

    @property
    def facts(self) -> dict[str, Any]:
        """What reward functions find in `extra_info`."""
        return self._conversation.facts

    @facts.setter
    def facts(self, facts: Mapping[str, Any]) -> None:
        if not isinstance(facts, Mapping):
            raise ChatError(f"chat.facts: facts are a dict, not a {type(facts).__name__}")
        self._conversation.facts = dict(facts)

    def adopt(self, conversation: Conversation) -> None:
        """Takes over a conversation that was continued in another process."""
        self._conversation.adopt(conversation)

    @property
    def prompt_ids(self) -> list[int]:
        return list(self._branch.prompt_ids)

    @property
    def ids(self) -> list[int]:
        """The prompt and everything so far, without what was told since the model's last turn."""
        return self._branch.ids

    @property
    def turns(self) -> int:
        """Turns that the model has had in this context."""
        return self._branch.turns

    @property
    def room(self) -> int:
        """Tokens that the model's next turn may have; data.max_response_length is for all turns and observations of a
        row."""
        if self._blocked or self._conversation.spent(self.limits):
            return 0
        left = self.limits.response - self._branch.length
        # A message takes a token at least: thousands of answers are not rendered only to find that they do not fit.
        return 0 if left <= len(self._messages) else max(0, left - len(self._observation_ids()))

    @property
    def over(self) -> bool:
        """Whether there is no room for a further turn."""
        return self.room < 1

    def start(self, messages: Sequence[Any], tools: Any = None) -> None:
        """Replaces the row's prompt, before the model's first turn. `tools=chat.tools` shows the run's tools in it."""
        self._require_not_begun()
        self.start_ids(self._template.prompt(messages, tools))
        self.messages = [dict(one) for one in messages]

    def start_ids(self, ids: Sequence[int]) -> None:
        """As `start`, with the prompt as token ids."""
        self._require_not_begun()
        if len(ids) > self.limits.prompt:
            most = f"data.max_prompt_length={self.limits.prompt}"
            raise ChatError(f"chat.start: the prompt has {len(ids)} tokens ({most})")
        if not len(ids):
            raise ChatError("chat.start: the prompt is empty")
        self._branch.prompt_ids, self._branch.own_prompt = self._checked(ids, "chat.start"), True

    def _require_not_begun(self) -> None:
        if self.turns or self._generating or self._ids or self._branch.length:
            raise ChatError("chat.start: the conversation has begun; chat.tell puts messages behind it")

    def branch(self, messages: Sequence[Any] | None = None, tools: Any = None) -> Chat:
        """A chat of its own within this conversation: behind other messages (a sub-agent), or without any behind all
        that is here so far (another attempt). What the model says there is a further row of the same sample."""
        chat = Chat(self._conversation, self.messages, self._setup, self._ask)
        chat._turn = self._turn
        if messages is None:
            chat._branch = self._conversation.open_branch(self.ids, self.limits, self._branch)
            chat._messages, chat._ids = list(self._messages), list(self._ids)
            chat.last, chat._opening_ids, chat._answered = self.last, self._opening_ids, self._answered
            chat._thoughtful, chat._last_token = list(self._thoughtful), self._last_token
            chat._blocked = self._blocked
        else:
            chat._begin(messages, tools, self._branch)
        return chat

    def compact(self, messages: Sequence[Any], tools: Any = None) -> None:
        """Continues behind these messages instead of all that is here so far: the model's next turn begins a further
        row of the same sample, with the whole room of a row."""
        if self._generating:
            raise ChatError("chat.compact: the model's turn is still under way")
        self._begin(messages, tools, self._branch)
        self._messages, self._ids, self._observation, self.last, self._answered = [], [], None, None, 0
        self._thoughtful, self._last_token, self._blocked = [], None, ""

    def _begin(self, messages: Sequence[Any], tools: Any, parent: Branch) -> None:
        self._branch = self._conversation.open_branch(self._template.prompt(messages, tools), self.limits, parent)
        self.messages = [dict(one) for one in messages]

    def tell(self, text: str, role: str = "user", name: str | None = None) -> None:
        """A message that the model reads before its next turn: of the user, or of a tool (`role="tool"` and its
        name, which some chat templates show)."""
        if not isinstance(text, str):
            raise ChatError(f"chat.tell: a text is told, not a {type(text).__name__}")
        if not self.turns:
            raise ChatError(
                "chat.tell: the model has not spoken yet; chat.start(messages) makes another prompt, and chat.branch "
                "and chat.compact take all messages at once"
            )
        if self._ids:
            raise ChatError("chat.tell: messages come before token ids")
        self._drop_thinking(role)
        self._messages.append({"role": role, "content": text} | ({"name": name} if name else {}))
        self._observation = None

    def _drop_thinking(self, role: str) -> None:
        """Continues without the thinking of earlier turns, where the template drops it before such a message: in a
        further row, because what was sampled with it is trained with it."""
        thinking = self._setup.thinking
        if thinking is None or not self._thoughtful or not thinking.drops_before(role):
            return
        ids, turns = self._branch.ids, self._thoughtful
        self._thoughtful = []
        if (kept := thinking.drop(ids, turns)) == ids:
            return
        try:
            self._branch = self._conversation.strip_branch(kept, self.limits, self._branch)
            self._last_token = ids[-1]
        except TooManyRows:
            self._blocked = "rows"
        except ChatError:  # too long even so
            self._blocked = "length"

    def tell_ids(self, ids: Sequence[int]) -> None:
        """Token ids that the model reads before its next turn, as they are: behind messages they begin that turn."""
        self._ids += self._checked(ids, "chat.tell_ids")
        self._observation = None

    def _checked(self, ids: Sequence[int], where: str) -> list[int]:
        """Token ids that an agent gives: others than the tokenizer's would end the engine."""
        made, size = [int(one) for one in ids], len(self.tokenizer)
        if strange := [one for one in made if not 0 <= one < size]:
            raise ChatError(f"{where}: token id {strange[0]} is not in the vocabulary of {size} tokens")
        return made

    def note_limit(self) -> None:
        """The agent ends because the chat is `over`: its limit becomes the response's finish reason."""
        self._branch.stopped_by = self._blocked or self._conversation.spent(self.limits) or "length"

    async def say(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> str:
        """The model's next turn as text; ChatFull where there is no room for one. `max_tokens` and `stop` end it
        earlier."""
        return texts_of([(await self.generate(max_tokens=max_tokens, stop=stop)).token_ids], self.tokenizer)[0]

    async def generate(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Output:
        """The model's next turn as tokens; otherwise as `say`."""
        room = self.room
        if room < 1:
            self.note_limit()
            raise ChatFull(NO_TURN[self._branch.stopped_by])
        most, texts = min(room, _most(max_tokens) or room), _texts(stop)
        observation = self._observation_ids()
        branch = self._branch
        if not observation and self.turns and branch.ids[-1] in self.tokenizer.all_special_ids:
            raise ChatError("chat.say: the model has ended its turn, and was told nothing since (chat.tell)")
        branch.add_observation(observation)
        self._answered += sum(one["role"] == "tool" for one in self._messages)
        self._messages, self._ids, self._observation = [], [], None
        wanted = Generate(branch.ids, most, texts, kept=True, branch=branch.number)
        return await self._generate(wanted)

    async def sample(
        self, prompt_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Output:
        """What the model writes behind any tokens. It is no part of the conversation."""
        room = min(self.limits.response, self.limits.prompt + self.limits.response - len(prompt_ids))
        if room < 1:
            raise ChatFull(f"a prompt of {len(prompt_ids)} tokens leaves no room (data.max_response_length)")
        if not len(prompt_ids):
            raise ChatError("chat.sample: the prompt is empty")
        ids, most = self._checked(prompt_ids, "chat.sample"), min(room, _most(max_tokens) or room)
        wanted = Generate(ids, most, _texts(stop), False, self._branch.number)
        return await self._generate(wanted)

    def request_behind(
        self,
        ids: list[int],
        settle: Settle,
        on_progress: Callable[[Output], None] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        """Asks for the model's turn behind any tokens, as a part of the conversation: it continues the branch that ends
        with them, or opens a further row of the same sample. `settle` is called in the loop's thread with the turn, or
        with why there is none. Several may be asked for at once. For agents in the trainer's process alone."""
        assert self._request is not None
        most = max_tokens or self.limits.response
        wanted = Generate(ids, most, _texts(stop), kept=True, branch=None, on_progress=on_progress)
        self._request(wanted, settle)

    async def pause(self, until: Awaitable[Any]) -> None:
        """Waits for something that is not the agent's own work: its deadline does not count meanwhile."""
        await self._ask(Pause(until))

    def drop_turn(self, ids: Sequence[int]) -> None:
        """Takes back the turn with which these tokens end: it had no consequence, and is not trained."""
        self._conversation.drop_turn(ids)

    def compose(self, prompt_ids: Sequence[int], ids: Sequence[int], mask: Sequence[int]) -> None:
        """The response from what `sample` gave: `mask` is 1 where the model wrote a token. Each further call makes a
        further row of the same sample; tokens that an earlier row has are trained there."""
        self._conversation.compose(self.limits, prompt_ids, ids, mask)

    def add_reward(self, reward: float) -> None:
        """The reward of the model's last turn, for samples and reward functions (`turn_rewards`)."""
        try:
            reward = float(reward)
        except (TypeError, ValueError, OverflowError):
            raise ChatError(f"chat.add_reward: a reward is a number, not {reprlib.repr(reward)}") from None
        if not math.isfinite(reward):
            raise ChatError(f"chat.add_reward: a reward is finite, not {reward}")
        self._conversation.turn_rewards.append((self._conversation.turns - 1, reward))

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """The answer of one of the run's tools. The model does not read it unless it is told (`role="tool"`)."""
        return (await self.call_tool(ToolCall(tool, arguments))).text

    async def call_tool(self, call: ToolCall) -> ToolAnswer:
        """As `call`, with all that the tool gave."""
        if not self.tools:
            raise ChatError("chat.call: the run has no tools (rollout.multi_turn.enable=True, rollout.tools=[...])")
        (answer,) = await self._ask([call])
        self._conversation.add_call(call, answer)
        self._conversation.add_spent([answer])
        return answer

    def tool_calls(self) -> list[ToolCall | Unreadable]:
        """The tool calls of the model's last turn, in the run's format; a turn that was cut has none."""
        if self.last is None or self.last.finish_reason != "stop":
            return []
        text = self.tokenizer.decode(self.last.token_ids, skip_special_tokens=False)
        # Some templates open the model's thinking for it, so that its turn has the closing mark alone. A call that the
        # model quotes while it thinks is none.
        opening = self.tokenizer.decode(self._opening_ids, skip_special_tokens=False)
        return self.call_format.read(open_thinking(opening) + text)

    @property
    def call_format(self) -> CallFormat:
        """How the model writes tool calls (rollout.multi_turn.format)."""
        return FORMATS[self._settings.format]

    async def answer(
        self, calls: Sequence[ToolCall | Unreadable], own: OwnAnswer | None = None
    ) -> list[dict[str, Any]]:
        """Runs these calls and tells the model an answer to each, in order; gives the messages. Calls that cannot be
        read, or are more than max_parallel_calls, are answered with the reason. `own` is asked first."""
        most = self._settings.max_parallel_calls
        wanted = [call for call in calls[:most] if isinstance(call, ToolCall)]
        mine = [await own(call) if own else None for call in wanted]
        left = [call for call, answer in zip(wanted, mine, strict=True) if answer is None]
        others = await self._ask(left) if left or not wanted else []
        for together in (*([one] for one in mine if one), others):  # an agent's own are called one after the other
            self._conversation.add_spent(together)
        rest = iter(others)
        answers = iter([answer or next(rest) for answer in mine])
        told, ids = list[dict[str, Any]](), self.call_format.ids_of(calls, self._calls_before)
        for number, call in enumerate(calls):
            name = call.name[:_LONGEST_NAME] if isinstance(call, ToolCall) else None
            if number >= most:
                text = f"Only {most} call(s) in a turn are answered; this one was not."
            else:
                readable = call if isinstance(call, ToolCall) else None
                answer = next(answers) if readable else ToolAnswer(str(call), error="unreadable")
                self._conversation.add_call(readable, answer)
                text = answer.text
            self.tell(text, role="tool", name=name)
            self._messages[-1]["tool_call_id"] = ids[number]
            told.append({"role": "tool", "content": text})
        return told

    def end(self, finish_reason: str) -> None:
        """Sets the response's finish reason to another than that of the model's last turn."""
        branch = self._branch
        if branch.is_stripped and not any(branch.mask) and branch.parent is not None:
            branch = self._conversation.branches[branch.parent]  # which has the last turn
        branch.finish_reason = finish_reason

    async def _generate(self, wanted: Generate) -> Output:
        if self._generating:
            raise ChatError("the model's turn is still under way: one at a time is awaited in a chat")
        self._generating = True  # and stays so where the await is cancelled: what the model wrote is not known then
        async with self._turn:
            output: Output = await self._ask(wanted)
        self.last, self._generating = output, False
        if wanted.kept:
            start = len(wanted.prompt_ids)
            self._thoughtful.append((start, start + len(output.token_ids)))
            self._last_token = None
        self._opening_ids = wanted.prompt_ids[-_OPENING:]
        return output

    def _observation_ids(self) -> list[int]:
        """What was told since the model's last turn, as tokens."""
        if self._observation is None:
            last, before = self._last_token, self._calls_before
            last = self._branch.ids[-1] if last is None else last
            shown = self._template.ids(self._messages, last, before) if self._messages else []
            self._observation = [*shown, *self._ids]
        return self._observation

    @property
    def _calls_before(self) -> int:
        """Tool calls in this context before the model's last turn."""
        return self._answered + sum(len(one.get("tool_calls") or ()) for one in self.messages)


def _texts(stop: Sequence[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) and one for one in texts):
        raise ChatError(f"stop is a text or a list of texts, none of them empty, not {reprlib.repr(stop)}")
    return texts


def _most(max_tokens: int | None) -> int | None:
    if max_tokens is not None and (not hasattr(max_tokens, "__index__") or max_tokens < 0):
        raise ChatError(f"max_tokens is a positive integer, not {reprlib.repr(max_tokens)}")
    return None if max_tokens is None else int(max_tokens)


@dataclass(frozen=True)
class Ended:
    """How a conversation ended: what the agent returned, or why it failed."""

    value: Any = None
    error: str | None = None


Event = Generate | Ended


async def run_to_end(lead: Awaitable[Any]) -> Ended:
    """Awaits an agent to its end, which nothing that it raises can prevent."""
    try:
        return Ended(await lead)
    except ChatFull:
        return Ended()
    except asyncio.CancelledError:
        return Ended(error="it was cancelled")
    except Exception as error:
        return Ended(error=well_formed(f"{describe_error(error)}{_place(error)}"))
    except BaseException as error:  # exit() in an agent ends its conversation, not the run
        return Ended(error=f"it raised {type(error).__name__}")


def describe_late(timeout_s: float) -> str:
    return f"it took longer than {timeout_s:g} seconds between two turns (agent.timeout_s)"


_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(asyncio.__file__).parent.parent))


def _place(error: BaseException) -> str:
    """Where an error was raised, by file and line: the last place that is not in a library."""
    found, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and "site-packages" not in file:
            found = f" ({Path(file).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found
