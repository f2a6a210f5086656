"""Misspelt names and options: the known one that a word is a slip of the keyboard away from.

There is no suggestion where two words merely look alike, since a wrong hint costs more than none: `lora` is not `lr`,
and a micro-batch is not a mini-batch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
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
