"""Formats in which calls are lines of Python: a list, or lines between two marks. They are parsed, never evaluated."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Any

from posttrain.conversations.formats.base import (
    FORMATS,
    BlockFormat,
    CallFormat,
    Unreadable,
    read_call,
    skip_thinking,
)
from posttrain.conversations.tools.base import ToolCall

_CALLS = re.compile(r"\[\s*[A-Za-z_][\w.]{0,200}\s*\(")
_START = re.compile(r"<\|python_start\|>|<\|tool_call_start\|>")
_END = re.compile(r"<[^<>\s]{1,40}>\Z")  # a special token behind the list
_NAMES = {"true": True, "false": False, "null": None}  # JSON's words, which models mix in
_LONGEST = 100_000
_TEXT = r'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\\n]|\\.)*+"|\'(?:[^\'\\\n]|\\.)*+\''


class LlamaPythonic(CallFormat):
    """A list at the beginning of a turn. A list of anything but calls is an answer.

    [search(query="..."), add(a=1, b=2)]
    """

    models = "Llama 3.2, Llama 4, LFM2"
    closing = "]"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        turn = skip_thinking(text)
        if not _CALLS.match(turn):  # a text in a list of calls may spell the mark
            turn = _START.split(turn, maxsplit=1)[-1].strip()
        if not _CALLS.match(turn):
            return []
        while found := _END.search(turn, max(0, len(turn) - 50)):
            turn = turn[: found.start()].rstrip()
        body = parse_python(turn)
        tree = body[0] if len(body) == 1 else None
        elements = tree.elts if isinstance(tree, ast.List) else []
        return [read_python(one) or self.explain() for one in elements] or [self.explain()]

    def write(self, call: ToolCall) -> str:
        return f"[{write_python(call)}]"


FORMATS.add("llama_pythonic", LlamaPythonic())


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


def parse_python(source: str) -> list[ast.expr]:
    """The expressions of a program; none if it cannot be parsed or has anything else."""
    if len(source) > _LONGEST:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in a string that a model wrote
            body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deeply to be parsed
        return []
    found = [one.value for one in body if isinstance(one, ast.Expr)]
    return found if len(found) == len(body) else []


def read_python(node: ast.expr) -> ToolCall | Unreadable | None:
    """The call of this expression; None if it is none, or has other arguments than literals by name."""
    if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
        return None
    try:
        given = {str(one.arg): _value(one.value) for one in node.keywords}
        return read_call({"name": _dotted(node.func), "arguments": given}, "arguments")
    except (ValueError, RecursionError):
        return None


def write_python(call: ToolCall) -> str:
    given = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
    return f"{call.name}({given})"


def _dotted(node: ast.expr) -> str:
    names = list[str]()
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError("not a name")
    return ".".join([node.id, *reversed(names)])


def _value(node: ast.expr) -> Any:
    """A literal as JSON has it; ValueError for anything else."""
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value) | float(value))):
            return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(one) for one in elements]
        case ast.Dict(keys=keys, values=values) if all(
            isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys
        ):
            return {key.value: _value(one) for key, one in zip(keys, values, strict=True)}  # pyright: ignore
    raise ValueError("not a literal")
