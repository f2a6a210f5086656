"""Environments as TRL has them: a class with `reset` whose other public methods are the tools that the model calls.

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

The conversation ends with a turn without a call. Its score is the attribute `reward`, if there is one. What else the
object has in public attributes (numbers, texts, lists of these) is for reward functions, in `extra_info`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from posttrain.conversations.chat import Chat
from posttrain.conversations.conversation import ChatError
from posttrain.conversations.tools.answers import answer_of, describe_error, failure, presented
from posttrain.conversations.tools.arguments import ArgumentError, convert_arguments
from posttrain.conversations.tools.base import ToolAnswer, ToolCall, ToolFault
from posttrain.conversations.tools.schema import schema_of

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
    """An episode of such an environment."""

    def __init__(self, environment: Any, chat: Chat, call: Callable[..., Awaitable[Any]]) -> None:
        self._environment, self._chat, self._call = environment, chat, call
        self._schemas = {one["function"]["name"]: one for one in method_schemas(type(environment))}
        self.score: float | None = None

    async def begin(self, row: dict[str, Any]) -> None:
        observation = await self._call(_bind_reset(self._environment.reset, row))
        if observation is not None and not isinstance(observation, str):
            raise ChatError(f"reset gave {type(observation).__name__}; a text, or None")
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
        try:
            said = answer_of(await self._call(getattr(self._environment, call.name), **arguments))
        except ToolFault as error:
            return failure("said", str(error))
        except Exception as error:  # how these environments tell the model that a call makes no sense
            words = describe_error(error)
            return failure("raised", f"The tool {call.name} failed: {words.rstrip('.')}.", words)
        finally:
            self._read_state()
        settings = self._chat.settings
        answer = said if isinstance(said, ToolAnswer) else ToolAnswer(said)
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


def _bind_reset(reset: Callable[..., Any], row: Mapping[str, Any]) -> Callable[[], Any]:
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
