"""The shell script that started this process, and lines of it that were meant as arguments of the command and never
arrived.

A comment, an empty line or a missing `\\` inside a continued command ends it there. The shell starts the program with
the first half of its arguments, and tries the other lines as commands when the program has ended. Where the shell's
script can be read (a file, `-c TEXT`, or a file as its input), such lines are found before anything is trained.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

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
