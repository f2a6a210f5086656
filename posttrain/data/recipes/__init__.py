"""Recipes prepare data sets for `posttrain data NAME`; `RECIPES` finds them by name. `tasks.py` declares each of them:

    GSM8K = register_recipe(Recipe(name="gsm8k", sentence="grade-school word problems", rows=gsm8k_rows, ...))

`recipe.py` has what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.registry import Registry

Row = dict[str, Any]


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be used, and why; the command counts such rows."""

    reason: str


# None: a row of another split.
Converted = Row | SkippedRow | None


@dataclass(frozen=True)
class Split:
    """One file to write, and where its rows come from."""

    name: str
    # Usual file names of a local copy, as patterns; `NAME.jsonl` and similar names are tried too.
    files: tuple[str, ...] = ()
    # The split's name on the hub, if different.
    hub: str = ""
    # Whether a folder may lack it.
    optional: bool = False


@dataclass(frozen=True)
class Recipe:
    """A data set. `rows` converts a split's `SourceRow`s in turn; their number and split, and the data set's name, are
    added to what it gives."""

    name: str
    sentence: str
    splits: tuple[Split, ...]
    # The columns of a copy, for messages.
    columns: str
    rows: Callable[..., Iterator[Converted]]
    hub_id: str
    hub_config: str = "default"
    # A split's file in the hub's repository; by default the hub's own parquet conversion is fetched.
    hub_file: str | None = None
    # What rows say in `data_source`; the recipe's name if empty.
    data_source: str = ""

    @property
    def folder(self) -> Path:
        """The default output folder."""
        return Path.home() / "data" / self.name


# Filled when it is first read: a message about a missing file names the recipe, and should not load them before.
RECIPES: Registry[Recipe] = Registry("recipe", package="posttrain.data.recipes")


def register_recipe(recipe: Recipe) -> Recipe:
    """`posttrain data NAME` makes this data set, and messages about missing files name the command."""
    RECIPES.add(recipe.name, recipe)
    return recipe
