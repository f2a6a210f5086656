"""Options of commands: argparse, with the option that was meant where one is misspelt, and `_` for `-`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from posttrain.config.closest import closest

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
