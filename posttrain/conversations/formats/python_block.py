"""Formats in which calls are lines of Python between two marks. They are parsed, never evaluated."""

from __future__ import annotations

import re
from collections.abc import Iterator

from posttrain.conversations.formats.base import FORMATS, BlockFormat, Unreadable
from posttrain.conversations.formats.llama_pythonic import parse_python, read_python, write_python
from posttrain.conversations.tools.base import ToolCall

_TEXT = r'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\\n]|\\.)*+"|\'(?:[^\'\\\n]|\\.)*+\''


class PythonBlock(BlockFormat):
    """A call is a line, and its arguments are literals with their names."""

    def read_block(self, inner: str) -> Iterator[ToolCall | Unreadable]:
        calls = [read_python(one) or self.explain() for one in parse_python(self.source(inner).strip())]
        yield from calls or [self.explain()]

    def source(self, inner: str) -> str:
        """The lines of a block."""
        return inner

    def block_end(self, text: str, place: int, closing: str) -> int:
        found = re.compile(f"{_TEXT}|{re.escape(closing)}", re.DOTALL).finditer(text, place)
        return next((one.start() for one in found if one[0] == closing), -1)

    def write(self, call: ToolCall) -> str:
        return f"{self.opening}\n{write_python(call)}\n{self.closing}"


class MiniCpm(PythonBlock):
    """The lines stand in a fenced block.

    <|thought_start|>...<|thought_end|><|tool_call_start|>
    ```python
    search(query="...")
    ```
    <|tool_call_end|>
    """

    models = "MiniCPM3, MiniCPM4"
    opening = "<|tool_call_start|>"
    closing = "<|tool_call_end|>"
    _fence = re.compile(r"\s*+```(?:python)?\n(.*?)(?:\n?```)?\s*\Z", re.DOTALL)

    def source(self, inner: str) -> str:
        found = self._fence.match(inner)
        return found[1] if found else inner

    def write(self, call: ToolCall) -> str:
        return f"{self.opening}\n```python\n{write_python(call)}\n```\n{self.closing}"


FORMATS.add("minicpm", MiniCpm())


class Olmo3(PythonBlock):
    """<function_calls>search(query="...")</function_calls>, with a line for each call."""

    models = "OLMo 3"
    opening = "<function_calls>"
    closing = "</function_calls>"


FORMATS.add("olmo3", Olmo3())
