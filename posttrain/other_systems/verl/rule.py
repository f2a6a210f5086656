"""Rule: the answer to keys of verl that are none of posttrain's settings, nor other spellings of them.

Four answers are given to a key of verl: it is honoured (a setting here has its name), translated, not needed here, or
not supported. The tables beside this file hold the last three; `answers.py` finds a key's answer among all four.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

HONOURED, TRANSLATED = "honoured", "translated"
NOT_NEEDED, NOT_SUPPORTED = "not needed", "not supported"
KINDS = (HONOURED, TRANSLATED, NOT_NEEDED, NOT_SUPPORTED)
NOTHING = ("null", "none", "", "{}", "[]")
"""Values that ask for nothing, whatever the key."""
ASYNC = "a step trains on whole batches, which are one update old at most"
"""Of keys of verl's asynchronous trainers."""


@dataclass(frozen=True)
class Rule:
    """One row of the tables."""

    pattern: str
    """A key; `*` stands for anything in it, `{a,b}` for either."""
    kind: str
    says: str
    """Why it is not needed or not supported, or what it is translated into."""
    do: str = ""
    """What to use instead of an unsupported key."""
    off: tuple[str, ...] = ("false",)
    """Values with which an unsupported key asks for nothing: it is then only noted."""
    switch: str = ""
    """Key (or its end, from the name where both keys part) that switches the feature on in verl; where it is not on, an
    unsupported key is only noted."""
    idle: str = ""
    """Name of the condition (`conditions.py`) under which an unsupported key does nothing in verl either."""
    how: str = ""
    """Name of the translation (`translations.py`)."""

    def matches(self, key: str) -> bool:
        return _compiled(self.pattern).fullmatch(key) is not None

    def switch_of(self, key: str) -> str:
        """The key that switches this one's feature on: `qat.enable` is `critic.qat.enable` for `critic.qat.mode`."""
        first = self.switch.split(".")[0]
        parts = key.split(".")
        return ".".join([*parts[: parts.index(first)], self.switch]) if first in parts else self.switch

    def asks_for_nothing(self, value: object) -> bool:
        """Whether the value leaves an unsupported feature off. A reference is verl's own default."""
        text = plain(value)
        return text in NOTHING or text.startswith("${") or any(_same(text, off) for off in self.off)


def not_needed(pattern: str, says: str) -> Rule:
    return Rule(pattern, NOT_NEEDED, says)


def not_supported(
    pattern: str, says: str, do: str, *, off: tuple[str, ...] = ("false",), switch: str = "", idle: str = ""
) -> Rule:
    return Rule(pattern, NOT_SUPPORTED, says, do, off, switch, idle)


def translated(pattern: str, how: str, says: str) -> Rule:
    return Rule(pattern, TRANSLATED, says, how=how)


def plain(value: object) -> str:
    """A value as text for comparing: without quotes and blanks around it, in small letters."""
    return "null" if value is None else str(value).strip().strip("\"'").lower()


def _same(text: str, other: str) -> bool:
    try:
        return float(text) == float(other)
    except ValueError:
        return text == other


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*|\{[^}]*\})", pattern)
    return re.compile("".join(_as_regex(part) for part in parts))


def _as_regex(part: str) -> str:
    if part == "*":
        return ".+"
    if part.startswith("{"):
        return "(?:" + "|".join(_wild(choice) for choice in part[1:-1].split(",")) + ")"
    return re.escape(part)


def _wild(choice: str) -> str:
    return ".+".join(re.escape(text) for text in choice.split("*"))
