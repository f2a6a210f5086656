"""Makes a run ignore one setting: whoever reads it in `posttrain`, outside of `posttrain/config`, gets its default.

`scripts/mutants.py` puts this folder on PYTHONPATH and the setting into `POSTTRAIN_MUTANT`, as JSON:

    {"root": "posttrain.config.root:PPOConfig", "key": "algorithm.gamma"}            reads give the default
    {"root": "posttrain.config.root:PPOConfig", "key": "trainer.seed", "value": 7}   reads give 7

Python imports `sitecustomize` when it starts, so every process of a run ignores the setting. Loading and checking the
configuration see the true value, and so do tests. A section knows neither its parents nor its key, so it learns its
place when it is read from its parent. A section that a test builds alone counts as any of the places of its class.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

VARIABLE = "POSTTRAIN_MUTANT"
SECTION = "posttrain.config.schema:Section"
"""Where the base class of all sections is defined."""
REPOSITORY = str(Path(__file__).resolve().parents[3]) + os.sep
PRODUCT = os.path.join(REPOSITORY, "posttrain", "")
CONFIG = os.path.join(PRODUCT, "config", "")
LOADER = "load_config"
PLACE = "_place_of_this_section"
"""Attribute of a section: the class of the topmost section that it was read from, and the dotted name from there."""


class Ignored:
    """The setting that is ignored, found in the classes when it is first needed: they are imported after this file."""

    def __init__(self, root: str, key: str, **instead: Any) -> None:
        self.root, self.key, self.instead = root, key, instead
        self.places: dict[str, str] | None = None
        self.default: Any = None
        self.inside = ""

    def find(self) -> None:
        """`places` maps the class of each section above the setting to the setting's name seen from there."""
        self.places = {}
        value, names = load(self.root)(), self.key.split(".")
        for depth, name in enumerate(names):
            if isinstance(value, dict):  # free keys: the reader gets the dict without this one
                self.inside = ".".join(names[depth:])
                return
            self.places[type(value).__name__] = ".".join(names[depth:])
            value = object.__getattribute__(value, name)
        self.default = value

    def matches(self, section: Any, name: str) -> bool:
        if self.places is None:
            if name not in self.key.split("."):
                return False
            self.find()
        assert self.places is not None
        top, path = place_of(section)
        wanted = self.places.get(top)
        return wanted is not None and wanted == path + name + (f".{self.inside}" if self.inside else "")

    def given_to_readers(self, value: Any) -> Any:
        if "value" in self.instead:
            return copy.deepcopy(self.instead["value"])
        return copy.deepcopy(self.default) if not self.inside else without(value, self.inside.split("."))


def without(value: Any, names: list[str]) -> Any:
    """A copy of a dict without one of its (nested) keys."""
    left = copy.deepcopy(value)
    holder = left
    for name in names[:-1]:
        holder = holder.get(name) if isinstance(holder, dict) else None
    if isinstance(holder, dict):
        holder.pop(names[-1], None)
    return left


def load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def place_of(section: Any) -> tuple[str, str]:
    return object.__getattribute__(section, "__dict__").get(PLACE, (type(section).__name__, ""))


def is_read_by_the_run(frame: FrameType | None) -> bool:
    """Whether the first caller in this repository outside `posttrain/config` is part of the product. Libraries between,
    such as `dataclasses`, count for whoever called them. While the configuration is loaded, none counts."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(CONFIG):
            if frame.f_code.co_name == LOADER:
                return False
        elif file.startswith(REPOSITORY) and file != __file__ and os.sep + ".venv" + os.sep not in file:
            return file.startswith(PRODUCT)
        frame = frame.f_back
    return False


def patch(section_class: type, ignored: Ignored) -> None:
    """From now on sections know their place, and the ignored setting reads as its default."""

    def read(section: Any, name: str) -> Any:
        value = object.__getattribute__(section, name)
        if isinstance(value, section_class):
            top, path = place_of(section)
            object.__getattribute__(value, "__dict__")[PLACE] = (top, f"{path}{name}.")
        elif not name.startswith("_") and ignored.matches(section, name) and is_read_by_the_run(sys._getframe(1)):
            return ignored.given_to_readers(value)
        return value

    def made(section: Any) -> None:
        # `dataclasses.replace` in the product has read the default already; its copy is no setting of the user's.
        if is_read_by_the_run(sys._getframe(1)):
            object.__getattribute__(section, "__dict__")[PLACE] = ("", "")

    patched: Any = section_class
    patched.__getattribute__ = read
    patched.__post_init__ = made  # the dataclasses below it, which are defined later, call it


class Patcher:
    """Patches the base class of sections as soon as its module is imported, without importing it here."""

    def __init__(self, ignored: Ignored) -> None:
        self.ignored = ignored
        self.module, _, self.name = SECTION.partition(":")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None, f"there is no module {name}: see SECTION in {__file__}"
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            patch(getattr(module, self.name), self.ignored)

        spec.loader.exec_module = execute_and_patch
        return spec


if VARIABLE in os.environ:
    sys.meta_path.insert(0, Patcher(Ignored(**json.loads(os.environ[VARIABLE]))))
