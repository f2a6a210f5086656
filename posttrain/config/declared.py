"""Settings that algorithms declare in their own files, placed into the sections of the tree.

A policy loss's own settings are `actor_rollout_ref.actor.policy_loss.*`, an estimator's `algorithm.*`. The sections are
brought up to date whenever a configuration is loaded, so that a file of the user's declares settings like a built-in
one: the keys are known, their ranges are checked, and `posttrain explain` describes them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from posttrain.algorithms.registry import ADV_ESTIMATORS, ESTIMATOR_KEY, LOSS_KEY, POLICY_LOSSES, Declaration
from posttrain.config.docs import sentences_of
from posttrain.config.registered import files_that_register
from posttrain.errors import UserError
from posttrain.external import import_external
from posttrain.registry import Registry

EXTERNAL = "actor_rollout_ref.model.external_lib"
C = TypeVar("C", bound=type)


class Kind(NamedTuple):
    """A kind of algorithm whose entries declare settings."""

    key: str
    """The setting that names the algorithm; its own settings lie beside it."""
    registry: Registry[Any]
    decorator: str

    @property
    def prefix(self) -> str:
        return self.key.rpartition(".")[0] + "."

    def own_keys(self, declaration: Declaration) -> tuple[str, ...]:
        """Full keys of an algorithm's own settings."""
        kind = declaration.settings
        return () if kind is None else tuple(self.prefix + field.name for field in dataclasses.fields(kind))


ESTIMATOR_KIND = Kind(ESTIMATOR_KEY, ADV_ESTIMATORS, "register_adv_est")
LOSS_KIND = Kind(LOSS_KEY, POLICY_LOSSES, "register_policy_loss")
KINDS = (ESTIMATOR_KIND, LOSS_KIND)


class _Section:
    """A section of settings and what its own file says, before anything is placed into it."""

    def __init__(self, section: type, kind: Kind, after: str) -> None:
        self.section, self.kind, self.after = section, kind, after
        self.written = {field.name: field for field in dataclasses.fields(section)}
        self.hints = dict(section.__annotations__)
        self.placed: tuple[type, ...] = ()

    def update(self) -> None:
        """Make the dataclass anew, in place (other modules hold the class), where other settings are declared now."""
        declared = tuple(one.settings for one in self.kind.registry.values() if one.settings is not None)
        if declared == self.placed:
            return
        self.placed = declared
        for name in self.section.__annotations__.keys() - self.written.keys():
            if name in vars(self.section):  # a field with a factory is no attribute of the class
                delattr(self.section, name)
        hints: dict[str, Any] = {}
        for name, hint in self.hints.items():
            hints[name] = hint
            setattr(self.section, name, _copied(self.written[name]))
            if name == self.after:
                hints |= self._place(declared)
        self.section.__annotations__ = hints
        for method in ("__init__", "__repr__", "__eq__", "__match_args__"):
            delattr(self.section, method)  # `dataclass` would keep the old ones
        dataclasses.dataclass(self.section)

    def _place(self, declared: tuple[type, ...]) -> dict[str, Any]:
        """Name -> type of the fields that were added."""
        added: dict[str, Any] = {}
        for kind in declared:
            hints = typing.get_type_hints(kind)
            for field in dataclasses.fields(kind):
                setattr(self.section, field.name, _copied(field, declared_by=kind))
                added[field.name] = hints[field.name]
        return added


_sections: list[_Section] = []


def holds_settings_of(kind: Kind, *, after: str) -> Callable[[C], C]:
    """Decorator of a section: the settings that algorithms of this kind declare are fields of it, behind `after`."""

    def decorate(section: C) -> C:
        _sections.append(_Section(section, kind, after))
        _sections[-1].update()
        return section

    return decorate


def place_declared_settings() -> None:
    """Bring the sections up to date with what is registered now."""
    for section in _sections:
        section.update()


def placed_settings() -> tuple[type, ...]:
    """The settings classes that the sections hold now: tables that are made from the sections depend on it."""
    return tuple(kind for section in _sections for kind in section.placed)


def _copied(field: dataclasses.Field[Any], **more: Any) -> Any:
    metadata = {**field.metadata, **more}
    return dataclasses.field(default=field.default, default_factory=field.default_factory, metadata=metadata)


def declared_sentence(field: dataclasses.Field[Any]) -> str:
    """The sentence under a field of an algorithm's settings class; read when it is asked for, as it costs a parse."""
    kind = field.metadata.get("declared_by")
    try:
        return "" if kind is None else sentences_of(kind).get(field.name, "")
    except (OSError, TypeError):  # a class typed into a notebook has no file
        return ""


def load_own_algorithms(given: Mapping[str, Any], unknown: Iterable[str], folder: Path) -> None:
    """Import the file that registers an estimator or a loss of the user's own, as its settings must be known.

    given: the values of `EXTERNAL` and of the keys that name an algorithm. unknown: keys that are no settings so far.
    A file that is missing or fails is left to the checks that follow and to the run, which say so.
    """
    for kind in KINDS:
        name, file = given.get(kind.key), given.get(EXTERNAL)
        if name in kind.registry and not any(key.startswith(kind.prefix) for key in unknown):
            continue
        if file is None:
            found = files_that_register(str(name), kind.decorator, folder)
            file = str(found[0]) if len(found) == 1 else None
        if isinstance(file, str):
            try:
                import_external(str(folder / file) if file.endswith(".py") else file)
            except UserError:
                continue
    place_declared_settings()
