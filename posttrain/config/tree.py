"""Tree: what a program's settings are, so that one loader serves `main_ppo` and the supervised trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config.checked import Checked, Finding
from posttrain.config.problem import Problem
from posttrain.config.schema import Section

if TYPE_CHECKING:
    from posttrain.config.merge import Merged, Spellings


@dataclass(frozen=True)
class Tree:
    """One tree of settings and the rules that belong to it."""

    # Name of the main file in `trainer/config/`.
    main: str
    root: type[Section]
    # The section of the model that is trained.
    model: str
    spellings: Spellings
    # The answer to a start with no argument at all.
    nothing_given: Callable[[], Problem]
    # Settings that follow from others; gets the keys that a Python caller hands over as objects.
    derive: Callable[[Merged, frozenset[str]], None]
    # Names that a file of the user's may register.
    check_names: Callable[[Merged, Path], None]
    # Problems and notes about the meaning of the values.
    check: Callable[[Checked], Iterable[Finding]]
    # Notes about settings that were set and can have no effect.
    idle: Callable[[Any, set[str]], Iterable[str]]
    # Modules that are trained whole beside adapters, so that an adapter folder may hold them.
    heads: tuple[str, ...] = ()
