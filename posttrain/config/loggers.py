"""Loggers that need a package of their own, and whether it is there; answered before a run."""

from __future__ import annotations

import importlib.util
import sys

from posttrain.config.choices import LOGGER_PACKAGES
from posttrain.config.problem import Problem
from posttrain.config.resolved import Resolved


def missing_packages(resolved: Resolved) -> list[Problem]:
    """One problem per logger of `trainer.logger` whose package is not installed."""
    found = []
    for name in dict.fromkeys(resolved.value("trainer.logger")):
        if name in LOGGER_PACKAGES and not _is_there(name):
            what = f"`trainer.logger` names {name}, but the package {name} is not installed."
            do = f'pip install "posttrain[{name}]" (or pip install {name}), or leave it out of trainer.logger'
            found.append(Problem(what, resolved.where("trainer.logger"), do, ("trainer.logger",)))
    return found


def _is_there(name: str) -> bool:
    return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None
