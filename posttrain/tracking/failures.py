"""Failures of a step in one line: the commonest error of the reward, and tools whose calls all failed.

A tool that never answers teaches nothing, and every response pays for asking it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

LONGEST = 120


def commonest(errors: Iterable[str | None]) -> str:
    """What most of the responses failed with that have an error: the first such text, and where it was raised."""
    texts = [error for error in errors if error]
    if not texts:
        return ""
    most = Counter(map(kind_of, texts)).most_common(1)[0][0]
    first, *frames = next(text for text in texts if kind_of(text) == most).splitlines() or [""]
    return first[:LONGEST] + (f" ({_place(frames[-1])})" if frames else "")


def kind_of(text: str) -> tuple[str, str]:
    """Errors of one name from one line are one kind, whatever they say."""
    first, *frames = text.splitlines() or [""]
    return first.split(":")[0], frames[-1] if frames else ""


def _place(frame: str) -> str:
    """`my_reward.py, line 3` of `  /path/my_reward.py, line 3, in compute_score: ...`."""
    file, _, rest = frame.strip().partition(", line ")
    return f"{PurePath(file).name}, line {rest.split(',')[0]}" if rest else frame.strip()[:LONGEST]


# Fewer calls than these may all fail by what the model asks for (`arguments`, `said`); what a tool does itself counts
# from the first.
FEW = 4
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
