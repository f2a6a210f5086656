"""Errors of rewards in a line: each response has its own text, and most differ in what they were about only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath

LONGEST = 120


def commonest(errors: Iterable[str | None]) -> str:
    """What most of the responses failed with that have an error: the first such text, and where it was raised."""
    texts = [error for error in errors if error]
    if not texts:
        return ""
    most = Counter(map(_kind, texts)).most_common(1)[0][0]
    first, *frames = next(text for text in texts if _kind(text) == most).splitlines() or [""]
    return first[:LONGEST] + (f" ({_place(frames[-1])})" if frames else "")


def _kind(text: str) -> tuple[str, str]:
    """Errors of one name from one line are one kind, whatever they say."""
    first, *frames = text.splitlines() or [""]
    return first.split(":")[0], frames[-1] if frames else ""


def _place(frame: str) -> str:
    """`my_reward.py, line 3` of `  /path/my_reward.py, line 3, in compute_score: ...`."""
    file, _, rest = frame.strip().partition(", line ")
    return f"{PurePath(file).name}, line {rest.split(',')[0]}" if rest else frame.strip()[:LONGEST]
