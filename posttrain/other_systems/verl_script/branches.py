"""`if` and `case` of a script that is not run: which branch counts, as far as its variables tell.

A condition whose variables come from outside is unknown. Of a block with unknown conditions the first branch counts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from posttrain.other_systems.verl_script.expansion import Variables, expand

_COMPARED: dict[str, Callable[[str, str], bool]] = {
    "=": fnmatchcase,
    "==": fnmatchcase,
    "!=": lambda left, right: not fnmatchcase(left, right),
    "-eq": lambda left, right: int(left) == int(right),
    "-ne": lambda left, right: int(left) != int(right),
    "-lt": lambda left, right: int(left) < int(right),
    "-le": lambda left, right: int(left) <= int(right),
    "-gt": lambda left, right: int(left) > int(right),
    "-ge": lambda left, right: int(left) >= int(right),
}
_EMPTY: dict[str, Callable[[str], bool]] = {"-n": bool, "-z": lambda text: not text}
_TEST = re.compile(r"^(?:\[\[\s(?P<double>.*)\s\]\]|\[\s(?P<single>.*)\s\]|test\s(?P<word>.*))$", re.DOTALL)


@dataclass
class Block:
    """An `if` or a `case` that is open. `takes`: whether the branch that is being read counts."""

    # Of a `case`: what its patterns are compared with; None where it is unknown.
    word: str | None = None
    is_case: bool = False
    takes: bool = True
    # Whether a branch before the present one counted.
    was_taken: bool = False
    # Whether all conditions up to here are known.
    is_sure: bool = True

    def enter(self, holds: bool | None) -> None:
        """Begin a branch; `holds` is None for a condition that is unknown."""
        self.was_taken = self.was_taken or self.takes
        self.is_sure = self.is_sure and holds is not None
        self.takes = not self.was_taken and holds is not False

    @classmethod
    def of_if(cls, holds: bool | None) -> Block:
        return cls(takes=holds is not False, is_sure=holds is not None)

    @classmethod
    def of_case(cls, word: str | None) -> Block:
        return cls(word=word, is_case=True, takes=False)

    def matches(self, patterns: str) -> bool | None:
        """Whether a branch of the `case` with these patterns (`a | b`) is the one."""
        if self.word is None:
            return None
        word = self.word
        return any(fnmatchcase(word, pattern.strip().strip("\"'")) for pattern in patterns.lstrip("( ").split("|"))


def holds(condition: str, variables: Variables) -> bool | None:
    """Whether a condition of `[ ]`, `[[ ]]`, `test`, `!`, `&&`, `||` and `{ }` is true; None if it is unknown."""
    parts = _split(condition.strip())
    value = _one(parts[0], variables)
    for sign, part in zip(parts[1::2], parts[2::2], strict=True):
        decides = sign == "||"  # what `value` must be so that the rest does not matter
        other = value if value is decides else _one(part, variables)
        value = other if value is (not decides) or other is decides else value
    return value


def _split(condition: str) -> list[str]:
    """[condition, sign, condition, ...] at the outer `&&` and `||`."""
    parts, depth, quote, start, at = [], 0, "", 0, 0
    while at < len(condition):
        char = condition[at]
        if quote or char in "\"'":
            quote = "" if char == quote else quote or char
        elif char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif depth == 0 and condition[at : at + 2] in ("&&", "||"):
            parts += [condition[start:at], condition[at : at + 2]]
            at += 1
            start = at + 1
        at += 1
    return [*parts, condition[start:]]


def _one(condition: str, variables: Variables) -> bool | None:
    text = condition.strip()
    if text.startswith("! "):
        inner = _one(text[2:], variables)
        return None if inner is None else not inner
    if text.startswith("{") and text.endswith("}"):
        return holds(text[1:-1].strip().rstrip(";"), variables)
    match = _TEST.match(text)
    if match is None:
        return {"true": True, "false": False}.get(text)
    inside = match["double"] or match["single"] or match["word"] or ""
    if len(parts := _split(inside)) > 1:  # `[[ a && b ]]`
        return holds(" ".join(part if part in ("&&", "||") else f"[ {part.strip()} ]" for part in parts), variables)
    return _test(inside, variables)


def _test(inside: str, variables: Variables) -> bool | None:
    try:
        words = [expand(word, variables) for word in shlex.split(inside)]
    except ValueError:
        return None
    if any("$" in word or "`" in word for word in words):
        return None
    try:
        if len(words) == 2 and words[0] in _EMPTY:
            return _EMPTY[words[0]](words[1])
        if len(words) == 3 and words[1] in _COMPARED:
            return _COMPARED[words[1]](words[0], words[2])
    except ValueError:
        return None
    return None
