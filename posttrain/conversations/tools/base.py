"""What a tool is: a name, a schema that the model sees, and an answer to each call.

An answer is words: what a function returned as text, errors as one sentence, long texts cut, secrets taken out.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.texts import MASK, mask_urls, well_formed


@dataclass(frozen=True)
class ToolCall:
    """A call as a model wrote it. Example: `ToolCall("calculator", {"expression": "2+3"})`."""

    name: str
    arguments: dict[str, Any]
    id: str | None = field(default=None, compare=False)
    """The id that the model gave it, in formats where models write one: its result is shown with this id."""


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
    cost: float = 0.0
    """What the call cost, in any unit: it counts for max_tool_cost. Never negative."""


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
    repeatable: bool = True
    """Whether a call may be made once more with nothing lost. A tool that sends a mail or pays says False: a group that
    called it is not issued again, and calls of a lost process are not made in another one."""
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


_PATH = re.compile(r"""(['"])(?:~|[A-Za-z]:)?[/\\][^'"]+\1|(?<![\w/:.])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+-]+){2,}[/\\]?""")
_LONGEST = 300


def answer_of(value: Any) -> str | ToolAnswer:
    """What a function returned, for the model: texts as they are, lists and dicts as JSON."""
    if isinstance(value, str | ToolAnswer):
        return value
    if value is None:
        return "(no result)"
    if isinstance(value, list | tuple | dict):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            pass
    return str(value)


def describe_error(error: BaseException) -> str:
    """An error in one line without paths and traceback: `ValueError: no such city`."""
    if isinstance(error, CallFailed):  # these words come from a worker process
        return error.words
    try:
        said = str(error).strip()
    except Exception:
        said = ""
    line = mask_urls(_PATH.sub("(a file)", said.splitlines()[0])) if said else ""
    line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def failure(kind: str, text: str, words: str = "", *, seconds: float = 0.0) -> ToolAnswer:
    """An answer that is an error of this kind: `text` for the model, `words` for us where they say more."""
    return ToolAnswer(text, error=f"{kind}: {words or text}", seconds=seconds)


def cut(text: str, most: int, side: str) -> str:
    """At most `most` characters, and a mark of how many are left out. `left` keeps the beginning, `right` the end,
    `middle` both ends: verl's meaning of `tool_response_truncate_side`."""
    if len(text) <= most:
        return text
    mark = f"[{len(text) - most:,} characters left out]"
    if side == "left":
        return f"{text[:most]}... {mark}"
    if side == "right":
        return f"{mark} ...{text[len(text) - most :]}"
    head = (most + 1) // 2
    return f"{text[:head]}... {mark} ...{text[len(text) - (most - head) :]}"


def presented(answer: ToolAnswer, secrets: Sequence[str], most: int, side: str) -> ToolAnswer:
    """The answer as the model and the samples may have it: no secrets, no half characters, not too long."""
    text = cut(redacted(well_formed(answer.text), secrets), most, side)
    return replace(answer, text=text, error=redacted(well_formed(answer.error), secrets) if answer.error else None)


def redacted(text: str, secrets: Sequence[str]) -> str:
    """The text with every secret masked."""
    for secret in [secrets] if isinstance(secrets, str) else secrets:  # one text is one secret, not its letters
        text = text.replace(secret, MASK) if secret else text
    return text
