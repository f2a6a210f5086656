"""A shell script read without running it: its commands as words, variables and arrays put in.

Read: assignments, arrays (also `+=`), quotes, continuation lines, comments, `$NAME`, `${NAME:-default}`, `$((1 + N))`.
Not run: commands, `$(...)`, loops. `if` and `case` are followed as far as the script's own variables tell; a
condition whose variables come from outside is unknown, and of a block with unknown conditions the first branch counts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from posttrain.other_systems.verl_script.expansion import Variables, expand, reference

_ASSIGNMENT = re.compile(r"^(\w+)(\+?)=(.*)$", re.DOTALL)
_NAME = re.compile(r"^\w+\+?=$")
_DECLARING = ("export", "local", "readonly", "declare")
_CONDITION = re.compile(r"\s(?P<condition>.*?)[;\n]\s*then\b", re.DOTALL)
_PATTERN = re.compile(r"(?:\s|#[^\n]*\n)*(?P<patterns>[^\n]*?)\)")
_ESAC = re.compile(r"(?:\s|#[^\n]*\n)*esac\b")
_SPLIT = re.compile(r"[ \t\n]+")
# Quoted, and yet no word at all where there are no arguments, or the array is empty.
_NO_WORDS = re.compile(r'"\$(@|\{@\}|\{\w+\[@\]\})"')


class Script:
    """A script's commands, and what it takes from outside."""

    def __init__(self, text: str) -> None:
        self.variables = Variables()
        self.commands: list[list[str]] = []
        # Continued lines are joined first, as a shell does; a file from Windows has a carriage return before each end.
        self._text = text.replace("\\\n", " ").replace("\r", "")
        self._place = 0
        self._blocks: list[Block] = []
        while self._place < len(self._text):
            if self._blocks and self._blocks[-1].is_case and self._begins_branch:
                self._pattern()
            elif words := self._command():
                self._take(words)

    # Of the `if` or `elif` that was read last.
    _last_condition: bool | None = None
    # Whether the next words are the patterns of a branch of a `case`.
    _begins_branch = False
    # Whether the word that is read stands where an assignment may.
    _assigns = False

    @property
    def _counts(self) -> bool:
        return all(block.takes for block in self._blocks)

    @property
    def _may_count(self) -> bool:
        """Whether only unknown conditions rule this branch out: it then sets what no other branch has set."""
        return all(block.takes or not block.is_sure for block in self._blocks)

    def _pattern(self) -> None:
        """`gpu | npu)`, or the end of the `case`."""
        self._begins_branch = False
        if match := _ESAC.match(self._text, self._place):
            self._blocks.pop()
        elif match := _PATTERN.match(self._text, self._place):
            block = self._blocks[-1]
            block.enter(block.matches(match["patterns"]))
        self._place = match.end() if match else len(self._text)

    def _take(self, words: list[str]) -> None:
        """An assignment, a word of the language, or a command."""
        while words and words[0] in ("then", "do", "{", "!", "set", *_DECLARING):
            if words[0] == "set":
                return
            words = [word for word in words[1:] if words[0] in ("then", "do", "{", "!") or not word.startswith("-")]
        if not words:
            return
        if words[0] == "if":
            self._blocks.append(Block.of_if(self._last_condition))
        elif words[0] == "case" and len(words) > 1:
            self._blocks.append(Block.of_case(None if "$" in words[1] or "`" in words[1] else words[1]))
            self._begins_branch = True
        elif words[0] in ("fi", "esac"):
            self._blocks[-1:] = []
        elif words[0] in ("else", "elif") and self._blocks:
            block = self._blocks[-1]
            block.enter((True if block.is_sure else None) if words[0] == "else" else self._last_condition)
            self._take(words[1:]) if words[0] == "else" else None
        elif all(_ASSIGNMENT.match(word) for word in words):
            for word in words:
                self._assign(word)
        elif self._counts:
            self.commands.append(words)

    def _assign(self, word: str) -> None:
        match = _ASSIGNMENT.match(word)
        assert match is not None
        # In a branch that may count, only a name without a value is set: the script's own default wins over a guess.
        name, more, value = match[1], match[2], match[3]
        if not self._counts and (not self._may_count or name in self.variables.texts):
            return
        self.variables.texts[name] = self.variables.texts.get(name, "") + value if more else value

    def _command(self) -> list[str]:
        """The words up to the end of a command; the end is consumed."""
        words: list[str] = []
        while self._place < len(self._text):
            char = self._text[self._place]
            if words in (["if"], ["elif"]) and (match := _CONDITION.match(self._text, self._place)):
                self._last_condition = holds(match["condition"], self.variables)
                self._place = match.end("condition")
                return words
            if char in " \t":
                self._place += 1
            elif char == "#":
                self._place = self._line_end()
            elif char in "<>":
                self._redirection()
            elif char in "\n;&|()":
                double = self._text[self._place : self._place + 2]
                self._place += 1
                if double == ";;":
                    self._place += 1
                    self._begins_branch = True
                return words
            else:
                self._word(words)
        return words

    def _line_end(self) -> int:
        end = self._text.find("\n", self._place)
        return len(self._text) if end < 0 else end

    def _redirection(self) -> None:
        """`> file`, `2>&1`, `<<EOF ... EOF`."""
        # Texts behind `<<EOF` may hold commands for another program.
        here = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n.*?^\s*\1\s*$", re.DOTALL | re.MULTILINE)
        match = here.match(self._text, self._place) or re.compile(r"[<>]+&?\s*\S+").match(self._text, self._place)
        self._place = match.end() if match else self._place + 1

    def _word(self, words: list[str]) -> None:
        """One word (or several, from an array), appended; or an array that is assigned."""
        parts: list[str] = [""]
        # In `NAME="${ARRAY[@]}"` the words of the array become one text.
        self._assigns = all(_ASSIGNMENT.match(word) or word in _DECLARING for word in words)
        quoted, start = False, self._place
        while self._place < len(self._text):
            char = self._text[self._place]
            # `NAME=(`: an array may span lines, so that it is no word that ends at a blank.
            if char == "(" and _NAME.match(parts[-1]) and len(parts) == 1:
                self._array(parts[0])
                return
            if char in " \t\n;&|()" or (char in "<>" and not quoted):
                break
            if char == "'":
                end = self._text.find("'", self._place + 1)
                end = len(self._text) if end < 0 else end
                parts[-1] += self._text[self._place + 1 : end]
                self._place, quoted = end + 1, True
            elif char == '"':
                self._place += 1
                self._double_quoted(parts)
                quoted = True
            elif char == "\\":
                parts[-1] += self._text[self._place + 1 : self._place + 2]
                self._place += 2
            elif char == "$":
                self._reference(parts, split="=" not in parts[-1])
            elif char == "`":
                end = self._text.find("`", self._place + 1)
                parts[-1] += self.variables.outside(self._text[self._place : end + 1])
                self._place = end + 1
            else:
                parts[-1] += char
                self._place += 1
        if self._place < len(self._text) and self._text[self._place] in "<>" and parts[-1].isdigit():
            return  # the number of a redirected stream
        # A quoted empty text is an argument; a quoted empty array is none.
        vanishes = _NO_WORDS.fullmatch(self._text, start, self._place) is not None and parts == [""]
        words += parts if quoted and not vanishes else [part for part in parts if part]

    def _double_quoted(self, parts: list[str]) -> None:
        while self._place < len(self._text) and self._text[self._place] != '"':
            char = self._text[self._place]
            if char == "$":
                self._reference(parts, split=False)
            elif char == "\\" and self._text[self._place + 1 : self._place + 2] in '"\\$`':
                parts[-1] += self._text[self._place + 1]
                self._place += 2
            else:
                parts[-1] += char
                self._place += 1
        self._place += 1

    def _reference(self, parts: list[str], *, split: bool) -> None:
        """What a reference stands for: further words from an array, or (outside quotes) from text with blanks."""
        value, self._place = reference(self._text, self._place, self.variables)
        if isinstance(value, str):
            value = _SPLIT.split(value.strip()) if split and " " in value.strip() and "$(" not in value else [value]
        if len(value) > 1 and self._assigns and len(parts) == 1 and _ASSIGNMENT.match(parts[0]):
            value = [" ".join(value)]
        if value:
            parts[-1] += value[0]
            parts += value[1:]

    def _array(self, name: str) -> None:
        """`NAME=( words )` or `NAME+=( words )`, over any number of lines."""
        self._place += 1
        words: list[str] = []
        while self._place < len(self._text) and self._text[self._place] != ")":
            char = self._text[self._place]
            if char in " \t\n":
                self._place += 1
            elif char == "#":
                self._place = self._line_end()
            elif char in ";&|<>(":
                self._place += 1
            else:
                self._word(words)
        self._place += 1
        key = name.rstrip("+=")
        if not self._counts and (not self._may_count or key in self.variables.arrays):
            return
        before = self.variables.arrays.get(key, []) if name.endswith("+=") else []
        self.variables.arrays[key] = before + words


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
        # Three values: true, false and unknown (None). An unknown side does not matter if the other one decides.
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
    # A reference that is left comes from outside of the script, so that the condition is unknown.
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
