"""A rollout engine of another package: whether it can be had here, and which of its arguments are a user's to give."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.spelling import closest

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
KEY = f"{ROLLOUT}.engine_kwargs"


@dataclass(frozen=True)
class OutsideEngine:
    """What is known of such an engine without importing it."""

    name: str
    """In `actor_rollout_ref.rollout.name`; also what is imported."""
    title: str
    packages: tuple[str, ...]
    """Names under which it is installed."""
    how_to_install: str
    """The command, and where to run it."""
    tried: tuple[str, ...]
    """Versions that the engine was tried with, by how they begin."""
    length: str
    """The argument that is the length of the longest row."""
    fixed: Mapping[str, Any]
    """Arguments that posttrain's engine is built on."""
    decided: Mapping[str, str]
    """Argument -> the setting that decides it."""
    ours: tuple[str, ...]
    """Arguments that no setting decides: posttrain's engine does."""
    holder: str
    """The class whose fields its arguments are ..."""
    files: tuple[str, ...]
    """... and where it may lie, as patterns within the package. In a folder of groups every class is one of it."""
    by_teams: bool = False
    """Whether several workers can hold one engine together."""
    by_stages: bool = False
    """Whether these can hold some of its layers each."""
    on_cpu: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are so on a CPU."""
    gone: Mapping[str, str] = field(default_factory=dict)
    """Arguments of older versions that scripts written for verl give -> what to do where they are not known."""

    @property
    def key(self) -> str:
        return f"{KEY}.{self.name}"

    @property
    def install(self) -> str:
        return f"{self.how_to_install}; or set {ROLLOUT}.name=native, which takes the same settings"

    # -- what is installed ----------------------------------------------------------------------------------------
    def installed_version(self) -> str | None:
        """Name and version of the package that is there."""
        import importlib.metadata

        for name in self.packages:
            try:
                return f"{name} {importlib.metadata.version(name)}"
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def is_tried(self, version: str) -> bool:
        """Of what `installed_version` gives."""
        number = version.partition(" ")[2]
        return any(number == known or number.startswith(f"{known}.") for known in self.tried)

    def said_tried(self) -> str:
        known = [version if version.count(".") > 1 else f"{version}.x" for version in self.tried]
        return f"{' and '.join(known)} {'was' if len(known) == 1 else 'were'}"

    def is_installed(self) -> bool:
        """Whether there is one to import; nothing is imported to find out."""
        try:
            return importlib.util.find_spec(self.name) is not None
        except (ImportError, ValueError):
            return False

    def installed_arguments(self) -> set[str] | None:
        """The names of its arguments, read from its source: an import would take seconds, and torch. None where there
        is none, or they lie elsewhere."""
        try:
            found = importlib.util.find_spec(self.name)
            if found is None or not found.submodule_search_locations:
                return None
            root = Path(found.submodule_search_locations[0])
            paths = [path for pattern in self.files for path in sorted(root.glob(pattern))]
            return {name for path in paths for name in self._fields_in(path)} or None
        except (ImportError, ValueError, OSError, SyntaxError):
            return None

    def _fields_in(self, path: Path) -> Iterator[str]:
        import ast

        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (node.name == self.holder or path.parent.name == "fields"):
                lines = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
                yield from (line.id for line in lines if isinstance(line, ast.Name))

    # -- what a user gives it -------------------------------------------------------------------------------------
    def given(self, engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return given_for(self.name, engine_kwargs)

    def faults(self, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """(what is wrong, what to do) of arguments for it, whatever its version."""
        for name, value in given.items():
            key = f"{self.key}.{name}"
            if name in self.fixed and value == self.fixed[name]:
                continue  # it is so anyway
            if name in self.decided:
                setting = self.decided[name]
                yield f"`{key}` cannot be set: `{setting}` decides it.", f"set {setting}, or remove it"
            elif name in self.fixed:
                yield f"`{key}={value}` cannot be used: posttrain's engine is built on {self.fixed[name]}.", "remove it"
            elif name in self.ours:
                yield f"`{key}` cannot be set: posttrain's engine decides it itself.", "remove it"
            elif name == self.length and not is_count(value):
                yield f"`{key}={value}`: expected an integer above 0.", f"give {key} such a value"

    def unknown(self, given: Mapping[str, Any], known: Iterable[str]) -> Iterator[tuple[str, str]]:
        """The same of names that are not among those that it has."""
        aside = {*self.decided, *self.ours}
        names = tuple(sorted({*known} - aside))
        for name in (name for name in given if name not in {*names, *aside, *self.fixed}):
            close = closest(name, names)
            near = f"did you mean `{close}`?" if close else f"remove it: the fields of its `{self.holder}` are its "
            near += "" if close else "arguments"
            yield (
                f"`{self.key}.{name}`: the {self.title} that is installed has no such argument.",
                self.gone.get(name, near),
            )


def given_for(engine: str, engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that were given for an engine."""
    given = engine_kwargs.get(engine)
    return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else {}


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
