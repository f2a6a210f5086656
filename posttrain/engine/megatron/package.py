"""The package megatron-core: whether it is there, and its parts, imported when they are needed (it takes seconds)."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import warnings
from typing import Any

from posttrain.config.megatron import INSTALL, is_installed
from posttrain.errors import UserError

PACKAGE = "megatron-core"


class MegatronError(UserError):
    """Megatron-Core is missing, or cannot do what was asked of it."""


def version() -> str:
    return importlib.metadata.version(PACKAGE)


def part(name: str) -> Any:
    """A module of megatron.core, without its warnings about packages that are not used here."""
    if not is_installed():
        raise MegatronError(
            "actor_rollout_ref.actor.strategy=megatron: the package megatron-core is not installed in this "
            f"environment; {INSTALL}"
        )
    with warnings.catch_warnings(action="ignore"):
        logging.getLogger("megatron.core").setLevel(logging.ERROR)
        return importlib.import_module(f"megatron.core.{name}" if name else "megatron.core")


def parallel_state() -> Any:
    return part("parallel_state")
