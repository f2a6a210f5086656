"""Mistakes of a command: misspelt names and options, and lines of the shell's script that never arrived as arguments.

A misspelt name is a slip of the keyboard away from a known one. There is no suggestion where two words merely look
alike, since a wrong hint costs more than none: `lora` is not `lr`, and a micro-batch is not a mini-batch.

A comment, an empty line or a missing `\\` inside a continued command ends it there. The shell starts the program with
the first half of its arguments, and tries the other lines as commands when the program has ended. Where the shell's
script can be read (a file, `-c TEXT`, or a file as its input), such lines are found before anything is trained.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn


def closest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that the word is a misspelling of; None if there is none."""
    found = sorted((slips(word, name), name) for name in known if _is_slip(word, name))
    return found[0][1] if found else None


def suggest(word: str, known: Iterable[str]) -> str:
    """A question to put before advice: "did you mean `NAME`? "; empty if the word is no misspelling."""
    name = closest(word, known)
    return f"did you mean `{name}`? " if name else ""


def _is_slip(word: str, name: str) -> bool:
    """One slip, two in words of eight letters or more; in words of three or fewer no letter may be another."""
    length = max(len(word), len(name))
    if abs(len(word) - len(name)) > 2 or word == name:
        return word == name
    if length <= 3 and len(word) == len(name):
        return sorted(word) == sorted(name) and slips(word, name) == 1
    return slips(word, name) <= (1 if length < 8 else 2)


def slips(word: str, name: str) -> int:
    """Letters left out, put in, mistaken or swapped with their neighbour (optimal string alignment)."""
    before, last = list[int](), list(range(len(name) + 1))
    for i, a in enumerate(word, 1):
        row = [i]
        for j, b in enumerate(name, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == name[j - 2] and word[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def same_key(key: str, known: str) -> bool:
    """Whether dotted keys agree part by part, one of the parts misspelt."""
    parts, others = key.split("."), known.split(".")
    if len(parts) != len(others):
        return False
    different = [(a, b) for a, b in zip(parts, others, strict=True) if a != b]
    return len(different) == 1 and _is_slip(*different[0])


def longer_or_shorter(name: str, known: str) -> bool:
    """Whether one name is the other with words before or behind it (`ppo_micro_batch_size` and `..._per_gpu`)."""
    short, long = sorted((name, known), key=len)
    return short.count("_") >= 1 and (long.startswith(f"{short}_") or long.endswith(f"_{short}"))


_UNKNOWN = "unrecognized arguments: "
_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")


class OptionParser(argparse.ArgumentParser):
    """As argparse.ArgumentParser. `--max_tokens 5` is taken for `--max-tokens 5`."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore
        spelled = None if args is None else [self._spelled(argument) for argument in args]
        return super().parse_known_args(spelled, namespace)

    def _spelled(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        known = self._option_string_actions
        if not name.startswith("--") or name in known:
            return argument
        others = (f"--{name[2:].replace(a, b)}" for a, b in (("_", "-"), ("-", "_")))
        other = next((one for one in others if one in known), name)
        return f"{other}{equals}{value}"

    def error(self, message: str) -> NoReturn:
        """Names the nearest option for each that there is not."""
        if message.startswith(_UNKNOWN):
            words = message.removeprefix(_UNKNOWN).split()
            message = "; ".join(self._about(word) for word in words if word.startswith("-")) or message
            message += f". `{self.prog} --help` lists the options"
        elif (found := _CHOICE.search(message)) and (near := closest(found[1], re.findall(r"[\w-]+", found[2]))):
            message += f"; did you mean {near}?"
        super().error(message)

    def _about(self, word: str) -> str:
        name = word.partition("=")[0]
        options = [option for option in self._option_string_actions if option.startswith("--")]
        near = closest(name.replace("_", "-"), options)
        longer = [option for option in options if option.startswith(name)]
        near = near or (longer[0] if len(longer) == 1 else None)
        return f"there is no option {name}" + (f" (did you mean {near}?)" if near else "")


_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_PROGRAM = re.compile(r"posttrain|\bverl\.|main_\w+|train\.sh|sft_trainer|reward_model_trainer")
# What a line begins with that is an argument and can be no command.
_ARGUMENT = re.compile(r"\s*(\+{0,2}[A-Za-z_]\w*(\.\w+)+=|--[A-Za-z])")
_MOST_BYTES = 1 << 20
_MOST_PARENTS = 4


def lost_lines(text: str, args: Sequence[str]) -> list[tuple[int, str]]:
    """(number, text) of the lines after the command with these arguments that are arguments, not commands."""
    keys = set(_keys(args))
    for words, end, lines in _commands(text):
        own = set(_keys(words))
        # A script may hold several commands: the one that started this process has no keys but ours.
        if own <= keys and (own or not keys) and _PROGRAM.search(" ".join(words)):
            lost = _arguments(lines, end)
            if lost:
                return lost
    return []


def _keys(words: Sequence[str]) -> list[str]:
    return [
        word.partition("=")[0].lstrip("+") for word in words if "=" in word and not word.startswith(("-", "$", "#"))
    ]


def _commands(text: str) -> Iterator[tuple[list[str], int, list[str]]]:
    """(words, number of the line after it, all lines) of every command, continued lines joined as a shell does."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        joined, line = "", lines[at]
        at += 1
        while line.endswith("\\") and not line.lstrip().startswith("#") and at < len(lines):
            joined += line[:-1] + " "
            line = lines[at]
            at += 1
        joined += line
        try:
            words = shlex.split(joined, comments=True)
        except ValueError:  # quotes that span lines: still good enough to find keys in
            words = joined.partition(" #")[0].split()
        yield words, at, lines


def _arguments(lines: list[str], start: int) -> list[tuple[int, str]]:
    """The lines from `start` on that are arguments, up to the first that is something else."""
    found = []
    for number in range(start, len(lines)):
        line = lines[number].strip()
        if not line or line.startswith("#"):
            continue
        if not _ARGUMENT.match(line):
            break
        found.append((number + 1, line.rstrip("\\").strip()))
    return found


def script_above() -> tuple[str, str] | None:
    """(text, name) of the script of the nearest shell above this process."""
    process = os.getppid()
    for _ in range(_MOST_PARENTS):
        folder = Path("/proc") / str(process)
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            if not words:
                return None
            if Path(words[0]).name.lstrip("-") in _SHELLS:
                return _text(folder, words[1:])
            process = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None
    return None


def _text(folder: Path, words: list[str]) -> tuple[str, str] | None:
    while words and words[0].startswith("-") and words[0] != "-c" and not words[0].endswith("c"):
        words = words[1:]
    if words and words[0].startswith("-"):
        return (words[1], "the shell's -c") if len(words) > 1 else None
    path = folder / "cwd" / words[0] if words else folder / "fd" / "0"
    if words and words[0].startswith("/"):
        path = Path(words[0])
    if not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return None
    return path.read_text(errors="replace"), words[0] if words else "the shell's input"
