"""Environments: classes with `reset` and `step`, as agents. One object plays one conversation.

class Guess:
    def __init__(self, top: int = 9): ...

    def reset(self, row, seed):
        self.secret = random.Random(seed).randint(1, self.top)
        return "Guess my number."                    # the prompt; None keeps the row's

    def step(self, action):
        right = action.strip() == str(self.secret)
        return "Wrong, try again.", float(right), right

An observation is a text (a message of the user), a message, a list of messages, or a list of token ids, which the model
reads as they are. The response's score is the sum of the rewards. Classes in Gymnasium's form work too: `reset(*, seed,
options)` gives (observation, info), and `step` five values; `options` is the row. So do TRL's environments, which have
tools instead of `step` (`MethodEpisode`).

If the run has tools, their calls are answered first: `step` is given the turns without a call.
"""

from __future__ import annotations

import inspect
import math
import reprlib
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from posttrain.conversations.chat import Chat, OwnAnswer
from posttrain.conversations.conversation import ChatError
from posttrain.conversations.settings import AGENT_KEY as KEY
from posttrain.conversations.tools.arguments import ArgumentError, convert_arguments
from posttrain.conversations.tools.base import (
    ToolAnswer,
    ToolCall,
    ToolFault,
    answer_of,
    describe_error,
    failure,
    presented,
)
from posttrain.conversations.tools.hosts import read_answer
from posttrain.conversations.tools.schema import schema_of
from posttrain.conversations.tools.threads import Threads
from posttrain.errors import UserError

Message = Mapping[str, Any]
Observation = str | Message | Sequence[Message] | Sequence[int] | None
Step = (
    tuple[Observation, float, bool]
    | tuple[Observation, float, bool, Mapping[str, Any]]
    | tuple[Observation, float, bool, bool, Mapping[str, Any]]
)
"""(observation, reward, whether it is over), and facts for reward functions and samples if there are any. Or as in
Gymnasium: (observation, reward, terminated, truncated, facts)."""


Lead = Callable[[Chat, dict[str, Any]], Coroutine[Any, Any, Any]]
Call = Callable[..., Awaitable[Any]]
"""Calls a method of an environment: a plain one in a thread."""


class Environment(Protocol):
    """What a class has; methods may be `async def`. Others run in threads, so they may block."""

    takes_token_ids: bool = False
    """Whether `step` is given the model's token ids instead of its text. Optional."""
    takes_messages: bool = False
    """Whether `step` is given all messages so far instead, the model's turn last. Optional."""
    gives_score: bool = True
    """Whether the sum of its rewards is the score. If not, reward functions find them in `extra_info` as
    `turn_rewards`. Optional."""

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begins an episode. Random choices follow from `seed`, so that the run can be repeated."""
        ...

    def step(self, action: Any) -> Step:
        """The model's turn, and what comes of it."""
        ...


def is_environment(source: Any) -> bool:
    """Whether it is a class with `reset` and `step`, or with `reset` and methods that are tools."""
    if not (inspect.isclass(source) and callable(getattr(source, "reset", None))):
        return False
    return callable(getattr(source, "step", None)) or has_method_tools(source)


def lacks_step(source: Any) -> bool:
    """Whether it is a class with `reset` that is neither an environment nor an agent."""
    return (
        inspect.isclass(source) and hasattr(source, "reset") and not (is_environment(source) or hasattr(source, "run"))
    )


def play(kind: Callable[..., Any], name: str, config: Mapping[str, Any], max_turns: int | None = None) -> Lead:
    """The agent that plays this environment, made anew with `config` for each conversation."""
    try:
        inspect.signature(kind).bind(**config)
    except TypeError as error:
        raise UserError(
            f"the environment {name} cannot be made with {dict(config)}: {error}.\n"
            f"  to do:  {KEY}.config has the parameters of its __init__"
        ) from None
    threads = Threads()

    async def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_async = inspect.iscoroutinefunction(getattr(method, "func", method))
        made = method(*args, **kwargs) if is_async else await threads.run(method, *args, **kwargs)
        return await made if inspect.isawaitable(made) else made

    async def lead(chat: Chat, row: dict[str, Any]) -> float | None:
        environment = await call(lambda: kind(**config))
        episode = (StepEpisode if hasattr(environment, "step") else MethodEpisode)(environment, chat, call)
        try:
            await episode.begin(row)
            await _converse(chat, episode, max_turns)
            return episode.score
        finally:
            if hasattr(environment, "close"):
                await call(environment.close)

    return lead


class Episode(Protocol):
    """One conversation with an environment."""

    score: float | None
    """None leaves it to the reward function."""

    @property
    def answer_own(self) -> OwnAnswer | None:
        """Answers calls of the environment's own tools."""
        ...

    async def begin(self, row: dict[str, Any]) -> None: ...

    async def judge(self, messages: Sequence[Message], text: str) -> tuple[bool, Observation]:
        """(whether it is over, what the model reads next) after a turn without tool calls."""
        ...


async def _converse(chat: Chat, episode: Episode, max_turns: int | None) -> None:
    """Turn after turn, until the episode is over, or a limit allows no further turn. The last turn is judged, too."""
    messages = list(chat.messages)
    while not chat.over:
        text = await chat.say(stop=chat.call_format.stop if chat.tools else ())
        messages.append({"role": "assistant", "content": text})
        is_last = max_turns is not None and chat.turns >= max_turns
        calls = chat.tool_calls() if chat.tools else []
        is_over, observation = (False, None) if calls else await episode.judge(messages, text)
        if is_over:
            return
        if is_last:
            chat.end("turns")
            return
        messages += await chat.answer(calls, episode.answer_own) if calls else _tell(chat, observation)
    chat.note_limit()


class StepEpisode:
    """An episode of a class with `reset` and `step`."""

    answer_own = None

    def __init__(self, environment: Any, chat: Chat, call: Call) -> None:
        self._environment, self._chat, self._call = environment, chat, call
        self.score = 0.0 if getattr(environment, "gives_score", True) else None

    async def begin(self, row: dict[str, Any]) -> None:
        observation = await self._call(_bind_reset(self._environment.reset, row, self._chat.seed))
        if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], Mapping):
            observation, facts = observation  # as in Gymnasium
            self._chat.facts.update(facts)
        if not _is_observation(observation):
            raise _wrong_result(
                self._environment, "reset", observation, f"{_OBSERVATION}, or None for the row's prompt"
            )
        _start(self._chat, observation)

    async def judge(self, messages: Sequence[Message], text: str) -> tuple[bool, Observation]:
        action: Any = text
        if getattr(self._environment, "takes_token_ids", False):
            assert self._chat.last is not None
            action = self._chat.last.token_ids
        elif getattr(self._environment, "takes_messages", False):
            action = [dict(one) for one in messages]
        made = await self._call(self._environment.step, action)
        try:
            observation, reward, done, facts = _parts_of_step(made)
        except (TypeError, ValueError):
            raise _wrong_result(self._environment, "step", made, _STEP) from None
        self._chat.add_reward(reward)
        if self.score is not None:
            self.score += reward
        self._chat.facts.update(facts)
        return done, observation


_OBSERVATION = "a text, a message, a list of messages or a list of token ids"
_STEP = f"(observation, finite reward, done), or with a dict of facts behind these; an observation is {_OBSERVATION}"


def _parts_of_step(made: Any) -> tuple[Any, float, bool, Mapping[str, Any]]:
    """TypeError or ValueError if it is no result of `step`."""
    observation, reward, done, *rest = made
    if rest and not isinstance(rest[0], Mapping):  # as in Gymnasium: terminated, truncated
        truncated = rest.pop(0)
        done = bool(done or truncated)
    (facts,) = rest or [{}]
    if not (done or _is_observation(observation)):
        raise TypeError
    if not math.isfinite(reward := float(reward)):
        raise ValueError
    return observation, reward, bool(done), dict(facts)


def _is_observation(value: Any) -> bool:
    if value is None or isinstance(value, str):
        return True
    if isinstance(value, Mapping):
        return _is_message(value)
    parts = list(value) if isinstance(value, Iterable) else [None]
    return all(_is_message(one) for one in parts) or all(hasattr(one, "__index__") for one in parts)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("content"), str)


def _wrong_result(environment: Any, method: str, made: Any, expected: str) -> ChatError:
    return ChatError(f"{type(environment).__name__}.{method} returned {reprlib.repr(made)}; expected {expected}")


def _bind_reset(reset: Callable[..., Any], row: dict[str, Any], seed: int) -> Callable[[], Any]:
    """`reset(row, seed)`, or `reset(seed=..., options=row)` where its parameters are named as in Gymnasium."""
    named = inspect.signature(reset).parameters
    first = next(iter(named.values()), None)
    if first is None or (first.name != "seed" and first.kind is not first.KEYWORD_ONLY):
        return partial(reset, row, seed)
    given = {"seed": seed, "options": row}
    return partial(reset, **{name: value for name, value in given.items() if name in named})


def _start(chat: Chat, observation: Observation) -> None:
    if isinstance(observation, str):
        chat.start([{"role": "user", "content": observation}], chat.tools)
    elif observation is not None and (messages := _messages(observation)) is not None:
        chat.start(messages, chat.tools)
    elif observation is not None:
        chat.start_ids(observation)  # pyright: ignore (token ids)


def _tell(chat: Chat, observation: Observation) -> list[dict[str, Any]]:
    """Gives the messages that the model reads; none for token ids."""
    if observation is None:
        raise ChatError("the environment is not over, and `step` gave no observation for the model's next turn")
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else _messages(observation)
    if messages is None:
        chat.tell_ids(observation)  # pyright: ignore (token ids)
        return []
    told = [{"role": message.get("role", "user"), "content": message["content"]} for message in messages]
    for message in told:
        chat.tell(message["content"], role=message["role"])
    return told


def _messages(observation: Message | Sequence[Any]) -> list[Message] | None:
    """Messages of an observation; None for token ids."""
    if isinstance(observation, Mapping):
        return [observation]
    return list(observation) if all(isinstance(one, Mapping) for one in observation) else None


_NO_TOOLS = ("reset", "close", "run", "step")


def has_method_tools(kind: type) -> bool:
    """Whether a class has public methods that a model could call; one with `run` is an agent."""
    return not hasattr(kind, "run") and bool(_tool_methods(kind))


def method_schemas(kind: type) -> list[dict[str, Any]]:
    """The schemas of a class's methods; UserError for one that a model could not call."""
    # Bound to nothing: a schema has no `self`.
    return [schema_of(types.MethodType(method, object()), name) for name, method in _tool_methods(kind).items()]


def _tool_methods(kind: type) -> dict[str, Callable[..., Any]]:
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: method for name, method in found if not name.startswith("_") and name not in _NO_TOOLS}


class MethodEpisode:
    """An episode of an environment in TRL's form: a class with `reset` whose other public methods are its tools.

    class Board:
        def reset(self, **row):
            self.reward = 0.0
            return "Find the treasure."                  # added to the prompt; None adds nothing

        def look(self, place: str) -> str:
            '''Looks at a place.

            Args:
                place: Its name
            '''
            self.reward = float(place == "cave")
            return "Gold!" if self.reward else "Nothing."

    The conversation ends with a turn without a call. Its score is the attribute `reward`, if there is one. What else
    the object has in public attributes (numbers, texts, lists of these) is for reward functions, in `extra_info`."""

    def __init__(self, environment: Any, chat: Chat, call: Callable[..., Awaitable[Any]]) -> None:
        self._environment, self._chat, self._call = environment, chat, call
        self._schemas = {one["function"]["name"]: one for one in method_schemas(type(environment))}
        self.score: float | None = None

    async def begin(self, row: dict[str, Any]) -> None:
        observation = await self._call(_bind_columns(self._environment.reset, row))
        if observation is not None and not isinstance(observation, str):
            raise _wrong_result(self._environment, "reset", observation, "a text, or None")
        chat = self._chat
        chat.tools = [*chat.tools, *self._schemas.values()]
        chat.start(_with_text(chat.messages, observation or ""), chat.tools)

    async def judge(self, messages: Sequence[Mapping[str, Any]], text: str) -> tuple[bool, None]:
        self._read_state()
        return True, None

    async def answer_own(self, call: ToolCall) -> ToolAnswer | None:
        """The answer to a call of one of the methods; None for another tool."""
        schema = self._schemas.get(call.name)
        if schema is None:
            return None
        try:
            arguments = convert_arguments(call.name, schema["function"]["parameters"], call.arguments)
        except ArgumentError as error:
            return failure("arguments", str(error))
        start = time.perf_counter()
        try:
            given = answer_of(await self._call(getattr(self._environment, call.name), **arguments))
            answer = read_answer(call.name, given, time.perf_counter() - start)
        except ToolFault as error:
            return failure("said", str(error), seconds=time.perf_counter() - start)
        except Exception as error:  # how these environments tell the model that a call makes no sense
            words, text = describe_error(error), f"The tool {call.name} failed: "
            return failure("raised", f"{text}{words.rstrip('.')}.", words, seconds=time.perf_counter() - start)
        finally:
            self._read_state()
        settings = self._chat.settings
        return presented(answer, (), settings.max_tool_response_length, settings.tool_response_truncate_side)

    def _read_state(self) -> None:
        # Read after each turn: the conversation may end for want of room.
        state = {name: value for name, value in vars(self._environment).items() if not name.startswith("_")}
        reward = state.pop("reward", None)
        self.score = float(reward) if isinstance(reward, int | float) else None
        self._chat.facts.update({name: value for name, value in state.items() if _is_plain(value)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(one, str | int | float | bool) for one in value)
    return value is None or isinstance(value, str | int | float | bool)


def _bind_columns(reset: Callable[..., Any], row: Mapping[str, Any]) -> Callable[[], Any]:
    """`reset` with the columns of the row that it takes, all of them where it has `**kwargs`."""
    columns = {**(row.get("extra_info") or {}), **{name: row.get(name) for name in ("data_source", "ground_truth")}}
    columns["prompt"] = row.get("raw_prompt")
    parameters = inspect.signature(reset).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        columns = {one.name: columns[one.name] for one in parameters if one.name in columns}
    return partial(reset, **columns)


def _with_text(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """The prompt with an observation behind the user's last message, as TRL puts it."""
    shown = [dict(one) for one in messages]
    if text and shown and shown[-1].get("role") == "user":
        shown[-1]["content"] = f"{shown[-1]['content']}{text}"
    elif text:
        shown.append({"role": "user", "content": text})
    return shown
