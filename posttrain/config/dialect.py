"""How a package that knows another system's settings plugs in: "do you know this key, and what does it mean here?"

Nothing else in `posttrain.config` knows of other systems. The package that `posttrain.plugins` names is imported when a
run's settings are first loaded; without one, other systems' keys are unknown keys.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from posttrain import plugins


@dataclass(frozen=True)
class Dialect:
    """What other systems call the settings of one program."""

    # Prefix there -> prefix here.
    moved: Mapping[str, str] = field(default_factory=dict)
    # Key there -> key here.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # The package's own object for a key that is no setting here; None for a key that it does not know.
    answer: Callable[[str], Any] = lambda key: None
    # Called with the `Merged` once all values are in it: act on the answered keys and on other words for values.
    apply: Callable[[Any], object] = lambda merged: None
    # All keys that it knows, to find what a misspelt one means.
    keys: Callable[[], Iterable[str]] = tuple
    # A sentence about a name that is only explained, not translated.
    advice: Callable[[str], str | None] = lambda name: None
    # Called with the `CommandLine` and the working folder: replace a main file that only the other system has; returns
    # (setting, source) of what that file would set.
    main_file: Callable[[Any, Path], list[tuple[str, str]]] = lambda line, folder: []


@cache
def dialect(program: str) -> Dialect:
    """The dialect of a program: `ppo_trainer`, `sft_trainer` or `reward_model_trainer`."""
    return Dialect() if plugins.dialect is None else importlib.import_module(plugins.dialect).dialect(program)


def pages() -> dict[str, str]:
    """The pages of docs/ that the package makes from its tables: file name -> text."""
    return {} if plugins.dialect is None else importlib.import_module(plugins.dialect).pages()
