"""Loggers that need a package of their own, and whether it is there; answered before a run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from posttrain.config.choices import LOGGER_PACKAGES
from posttrain.config.problem import Problem
from posttrain.config.resolved import Resolved


def missing_packages(resolved: Resolved) -> list[Problem]:
    """One problem per logger of `trainer.logger` whose package is not installed; a run goes on without that logger."""
    found = []
    names = resolved.value("trainer.logger")
    for name in sorted(set(names) - set(installed(names)), key=names.index):
        what = f"`trainer.logger` names {name}, but the package {name} is not installed: the run goes on without it."
        do = f'pip install "posttrain[{name}]" (or pip install {name}), or leave it out of trainer.logger'
        found.append(Problem(what, resolved.where("trainer.logger"), do, ("trainer.logger",)))
    return found


def missing_notes(resolved: Resolved) -> list[str]:
    """The same in one line each, for the notes that a run prints first."""
    return [f"{problem.what} What to do: {problem.do}." for problem in missing_packages(resolved)]


def installed(names: Sequence[str]) -> list[str]:
    """The loggers among `names` that need no package, or whose package is there."""
    return [name for name in names if name not in LOGGER_PACKAGES or _is_there(name)]


def _is_there(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None
