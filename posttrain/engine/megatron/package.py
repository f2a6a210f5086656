"""The package megatron-core: whether it is there, and its parts, imported when they are needed (it takes seconds)."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import warnings
from typing import Any

from posttrain.config.megatron import install_words, is_installed
from posttrain.config.train_engines import RL
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
            f"{RL.strategy}=megatron: the package megatron-core is not installed in this environment; "
            f"{install_words(RL.strategy)}"
        )
    with warnings.catch_warnings(action="ignore"):
        logging.getLogger("megatron.core").setLevel(logging.ERROR)
        return importlib.import_module(f"megatron.core.{name}" if name else "megatron.core")


def parallel_state() -> Any:
    return part("parallel_state")
