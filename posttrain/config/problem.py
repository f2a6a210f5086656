"""Problem and ConfigError: what was wrong, where it was set, what to do; all problems in one error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from posttrain.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration."""

    # What is wrong, as a sentence.
    what: str
    # Where it was set: "command line", "config/grpo.yaml", "environment variable LEARNING_RATE", ...
    where: str = ""
    # What to do about it.
    do: str = ""
    # Canonical keys concerned; used to drop follow-up problems of a key that could not be read at all.
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"   where: {self.where}")
        if self.do:
            lines.append(f"   what to do: {self.do}")
        return "\n".join(lines)


class ConfigError(UserError):
    """A configuration that cannot be run; `problems` holds everything that was found, not only the first thing."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = list(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        if len(self.problems) == 1:
            return f"1 problem in the configuration:\n1. {self.problems[0]}"
        body = "\n".join(f"{i}. {problem}" for i, problem in enumerate(self.problems, 1))
        return f"{len(self.problems)} problems in the configuration:\n{body}"
