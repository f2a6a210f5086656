"""A plain function as a tool: its schema from its hints and docstring, its settings behind `*`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from posttrain.conversations.tools.answers import answer_of
from posttrain.conversations.tools.base import Tool, ToolAnswer
from posttrain.conversations.tools.schema import schema_of
from posttrain.conversations.tools.settings import PLACE, read_settings, secrets_of
from posttrain.conversations.tools.threads import Threads
from posttrain.errors import UserError


class FunctionTool(Tool):
    """Calls `function(**arguments)`, in a worker process unless the function says `isolated = False`.

    Keyword-only parameters come from the settings, or from the conversation's row, which goes before them."""

    def __init__(
        self, function: Callable[..., Any], settings: Mapping[str, Any] | None = None, name: str | None = None
    ) -> None:
        self.name = name or getattr(function, "__name__", "tool")
        self.schema = schema_of(function, self.name)
        self._function, self._threads = function, Threads()
        own = str(getattr(function, "__module__", "")).startswith("posttrain.")
        self.isolated, self.stateless = getattr(function, "isolated", not own), True
        self._settings = read_settings(self.name, function, settings or {}, rest=True)
        self.secrets = secrets_of(self._settings)
        parameters = inspect.signature(function).parameters.values()
        own = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
        self._own = {one.name for one in own}
        self._needed = [one.name for one in own if one.default is one.empty and one.name not in self._settings]
        self._given: dict[Hashable, dict[str, Any]] = {}

    async def open(self, conversation: Hashable, **given: Any) -> None:
        mine = {key: value for key, value in given.items() if key in self._own}
        missing = [key for key in self._needed if key not in mine]
        if missing:
            raise UserError(
                f"the tool {self.name} needs {missing[0]}: neither {PLACE}.{self.name}.{missing[0]} nor the row's "
                f"tools_kwargs.{self.name}.create_kwargs gives it"
            )
        if mine:
            self._given[conversation] = mine

    async def call(self, conversation: Hashable, arguments: dict[str, Any]) -> str | ToolAnswer:
        kwargs = {**self._settings, **self._given.get(conversation, {}), **arguments}
        if inspect.iscoroutinefunction(self._function):
            return answer_of(await self._function(**kwargs))
        # A worker process has nothing else to do; in the trainer a thread keeps the tool's event loop free.
        made = self._function(**kwargs) if self.isolated else await self._threads.run(self._function, **kwargs)
        return answer_of(await made if inspect.isawaitable(made) else made)  # a decorator may hide `async def`

    async def close(self, conversation: Hashable) -> None:
        self._given.pop(conversation, None)
