"""Rule: the answer to keys of verl that are none of posttrain's settings, nor other spellings of them.

Four answers are given to a key of verl: it is honoured (a setting here has its name), translated, not needed here, or
not supported. The tables beside this file hold the last three; `answers.py` finds a key's answer among all four.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from functools import cache

from posttrain.config.merge import Entry, Merged
from posttrain.config.resolved import Problem

HONOURED, TRANSLATED = "honoured", "translated"
NOT_NEEDED, NOT_SUPPORTED = "not needed", "not supported"
KINDS = (HONOURED, TRANSLATED, NOT_NEEDED, NOT_SUPPORTED)
# Values that ask for nothing, whatever the key.
NOTHING = ("null", "none", "", "{}", "[]")
PACKED = "the Megatron engine packs rows, which gives the same numbers"
CHUNKED = "logits never exist for more than a chunk of tokens"
# Of keys of verl's asynchronous trainers.
ASYNC = "there is one trainer, and asynchronous training is a setting of it"


@dataclass(frozen=True)
class Rule:
    """One row of the tables."""

    # A key; `*` stands for anything in it, `{a,b}` for either.
    pattern: str
    kind: str
    # Why it is not needed or not supported, or what it is translated into.
    says: str
    # What to use instead of an unsupported key.
    do: str = ""
    # Values that disable the feature of an unsupported key: it then gives only a note.
    off: tuple[str, ...] = ("false",)
    # Key (or its end, from the name where both keys part) that switches the feature on in verl; where it is not on, an
    # unsupported key is only noted.
    switch: str = ""
    # Name of the condition (`translations.py`) under which an unsupported key does nothing in verl either.
    idle: str = ""
    # Name of the translation (`translations.py`).
    how: str = ""

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


class Rules:
    """Rules in the order in which they are tried.

    Most patterns name their keys one by one, so these are looked up. Compiling all patterns as regular expressions took
    a third of the time that a first configuration needs.
    """

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self._exact: dict[str, int] = {}
        self._wild: list[tuple[int, str]] = []
        for place, rule in enumerate(rules):
            for key in spelled_out(rule.pattern):
                if "*" in key:
                    self._wild.append((place, key))
                else:
                    self._exact.setdefault(key, place)

    def find(self, key: str) -> Rule | None:
        """The first rule that knows the key."""
        # The first rule counts: a pattern before the exact one wins, as in a list that is searched from the top.
        place = self._exact.get(key, len(self.rules))
        place = min((at for at, pattern in self._wild if at < place and _matches(pattern, key)), default=place)
        return self.rules[place] if place < len(self.rules) else None


def spelled_out(pattern: str) -> list[str]:
    """`{a,b}.c` is `a.c` and `b.c`."""
    parts = re.split(r"\{([^}]*)\}", pattern)  # text and choices take turns
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(words) for words in itertools.product(*choices)]


def _matches(pattern: str, key: str) -> bool:
    """`*` stands for one character or more."""
    # The beginning first, since most patterns differ there and are then never compiled.
    return key.startswith(pattern.partition("*")[0]) and _compile(pattern).fullmatch(key) is not None


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(".+".join(map(re.escape, pattern.split("*"))))


ON = ("true", "1", "yes", "on")


def number(merged: Merged, key: str, default: float) -> float:
    """The value of a key, which may still be text; `default` if it is no finite number."""
    try:
        found = float(str(merged.value(key)))
    except (KeyError, ValueError):
        return default
    return found if math.isfinite(found) else default


def refuse(merged: Merged, entry: Entry, why: str, do: str) -> None:
    """Add a problem: this value cannot be used."""
    what = f"`{entry.spelling}={entry.value}` cannot be used: {why}."
    merged.problems.append(Problem(what, entry.source, do))


def is_empty(entry: Entry) -> bool:
    """Whether the value says nothing."""
    return plain(entry.value) in NOTHING or plain(entry.value).startswith("${oc.select")


def given(merged: Merged, key: str) -> str:
    """What the user said under a key, as plain text; empty if nothing."""
    # Only what the user said: a default of ours must not decide what verl's script means.
    entry = merged.elsewhere.get(key) or merged.entries.get(key)
    return plain(entry.value) if entry is not None and entry.explicit else ""
