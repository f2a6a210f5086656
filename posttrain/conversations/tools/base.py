"""What a tool is: a name, a schema that the model sees, and an answer to each call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call as a model wrote it. Example: `ToolCall("calculator", {"expression": "2+3"})`."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolAnswer:
    """What came of a call."""

    text: str
    """What the model is shown."""
    error: str | None = None
    """Why it is an error, for metrics and samples, as `kind: words`; `text` says it to the model too."""
    reward: float = 0.0
    """Of this call alone."""
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class ToolFault(Exception):
    """Raised by a tool: its text, one sentence, is what the model is told. The kind of error is `said`."""


class CallFailed(Exception):
    """A call failed: `kind` as in `Counts`, and the words for metrics."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind, self.words = kind, words


class Tool(ABC):
    """One object serves all conversations; what belongs to one is kept under its `conversation`."""

    name: str
    schema: dict[str, Any]
    """OpenAI's: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`."""
    at_once: int = 32
    """Calls of this tool that run side by side; others wait, and their deadline with them."""
    isolated: bool = True
    """Whether calls run in worker processes, where one that hangs or exits costs that call alone. A tool that needs the
    trainer's memory says False, and runs in a thread of it."""
    stateless: bool = False
    """Whether it keeps nothing between calls, so that any worker process can serve any conversation."""
    secrets: Sequence[str] = ()
    """Taken out of whatever the tool says."""
    note: str = ""
    """What the user should know about how the tool was set up."""

    async def open(self, conversation: Hashable, **given: Any) -> None:  # noqa: B027
        """A conversation begins. `given` is its row's own (verl's `tools_kwargs[name]["create_kwargs"]`)."""

    @abstractmethod
    async def call(self, conversation: Hashable, arguments: dict[str, Any]) -> str | ToolAnswer:
        """The answer to a call, whose arguments fit the schema. Errors may be raised: `ToolFault` in plain words."""

    async def reward(self, conversation: Hashable) -> float:
        """What the whole conversation earns by this tool, asked once when it is over."""
        return 0.0

    async def close(self, conversation: Hashable) -> None:  # noqa: B027
        """The conversation has ended, however."""

    def shutdown(self) -> None:  # noqa: B027
        """Nobody calls for now; processes that the tool started may end. A later call may start them anew."""
