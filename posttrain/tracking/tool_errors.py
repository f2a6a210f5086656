"""Tools whose calls of a step all failed: nothing is learnt from asking them, and every response pays for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LONGEST = 120
FEW = 4
"""Fewer calls than these may all fail by what the model asks for (`arguments`, `said`); what a tool does itself counts
from the first."""
_ASKED_WRONGLY = ("arguments", "said")
_NO_TOOL = ("unknown", "unreadable")


def failing_tools(rows: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, list[str]]:
    """By name, the errors of tools that answered no call of these responses."""
    by_tool: dict[str, list[str | None]] = {}
    for call in (call for row in rows for call in row):
        if _kind(call["error"]) not in _NO_TOOL:
            by_tool.setdefault(str(call["name"]), []).append(call["error"])
    failing = {}
    for name, found in sorted(by_tool.items()):
        errors = [error for error in found if error]
        own = any(_kind(error) not in _ASKED_WRONGLY for error in errors)
        if len(errors) == len(found) and (own or len(errors) >= FEW):
            failing[name] = errors
    return failing


def words_on(failing: Mapping[str, Sequence[str]]) -> str:
    """Each tool with its commonest error: errors of one name count as one, whatever they say."""
    return "; ".join(_words(name, errors) for name, errors in failing.items())


def _words(name: str, errors: Sequence[str]) -> str:
    calls = f"all {len(errors)} calls" if len(errors) > 1 else "the only call"
    most = Counter(map(_class, errors)).most_common(1)[0][0]
    first = next(error for error in errors if _class(error) == most)
    return f"{calls} of the tool {name} failed, most often: {first[:LONGEST].rstrip('.')}"


def _class(error: str) -> tuple[str, ...]:
    return tuple(error.split(":")[:2])


def _kind(error: str | None) -> str:
    return (error or "").partition(":")[0]
