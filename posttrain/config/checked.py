"""What the checks of meaning work on and give: a typed configuration, problems and notes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from posttrain.config.closest import closest
from posttrain.config.problem import Problem


@dataclass
class Checked:
    """A typed configuration under examination."""

    config: Any
    explicit: set[str]
    """Canonical keys that the user set."""
    where: Callable[[str], str]
    """Key -> where it was set."""

    def problem(self, what: str, do: str, *keys: str) -> Problem:
        return Problem(what, ", and ".join(dict.fromkeys(self.where(key) for key in keys)), do, keys)


Finding = Problem | str
"""A problem, or a note."""


def nearest_name(value: Any, known: tuple[str, ...]) -> str:
    """Advice for a name that is not known."""
    close = closest(str(value), known)
    return f"did you mean `{close}`?" if close else "choose one of them"
