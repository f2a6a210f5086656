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
    from posttrain.config.aliases import Spellings
    from posttrain.config.merge import Merged


@dataclass(frozen=True)
class Tree:
    """One tree of settings and the rules that belong to it."""

    main: str
    """Name of the main file in `trainer/config/`."""
    root: type[Section]
    model: str
    """The section of the model that is trained."""
    spellings: Spellings
    nothing_given: Callable[[], Problem]
    """The answer to a start with no argument at all."""
    derive: Callable[[Merged, frozenset[str]], None]
    """Settings that follow from others; gets the keys that a Python caller hands over as objects."""
    check_names: Callable[[Merged, Path], None]
    """Names that a file of the user's may register."""
    check: Callable[[Checked], Iterable[Finding]]
    """Problems and notes about the meaning of the values."""
    idle: Callable[[Any, set[str]], Iterable[str]]
    """Notes about settings that were set and can have no effect."""
    heads: tuple[str, ...] = ()
    """Modules that are trained whole beside adapters, so that an adapter folder may hold them."""
