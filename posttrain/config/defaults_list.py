"""Hydra's `defaults:` lists: which files make up a run's settings, in which order, and where each is placed.

    defaults:
      - data: legacy_data                         # data/legacy_data.yaml, placed at `data`
      - actor@actor_rollout_ref.actor: dp_actor   # placed at `actor_rollout_ref.actor`
      - optional mine: one                        # no error if mine/one.yaml does not exist
      - _self_                                    # this file's own values
      - override algorithm: grpo                  # replaces the choice that another file makes

The rules and messages are those of Hydra 1.3; `tests/config/test_defaults_list.py` compares the two. Done here because
Hydra's public `compose` neither says which file a value came from nor leaves out its own section, which takes longer
to load than all of posttrain's.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.yaml_text import read_yaml

_HEADER_BYTES = 512
_REFERENCE = re.compile(r"\$\{([^}]*)\}")
_SELF_WARNING = "https://hydra.cc/docs/1.2/upgrades/1.0_to_1.1/default_composition_order"


class ComposeError(ValueError):
    """Files that do not fit together."""


@dataclass(frozen=True)
class Item:
    """One line of a defaults list: a file by name, or the choice of a group."""

    # File, choice or choices; None (`group: null`) is no choice.
    name: str | list[str] | None
    group: str | None = None
    # Behind `@`: where the file is placed, relative to where the file with this list is.
    package: str | None = None
    optional: bool = False
    override: bool = False
    # Whether it was added on the command line (`+group=choice`).
    appended: bool = False

    def group_path(self, base: str) -> str:
        """The group's folder; `base` is the folder of the file that holds this list."""
        own = self.group if self.group is not None else str(self.name).rpartition("/")[0]
        if own.startswith("/") or (self.group is None and str(self.name).startswith("/")):
            return own.removeprefix("/")
        return "/".join(filter(None, (base, own)))

    def config_path(self, base: str) -> str:
        last = self.name if self.group is not None else str(self.name).rpartition("/")[2]
        return "/".join(filter(None, (self.group_path(base), str(last))))

    def final_package(self, base: str, parent: str, header: str | None) -> str:
        """Where the file is placed: what the list says, else the file's header, else the group's name."""
        package = "" if self.package == "_here_" else self.package
        if package is not None and "_group_" in package:
            package = "_global_." + package.replace("_group_", self.group_path(base).replace("/", "."))
        if package is None:
            package = header
        if package is None:
            own = self.group if self.group is not None else str(self.name).rpartition("/")[0]
            package = own.removeprefix("/").replace("/", ".")
        if isinstance(self.name, str):
            package = package.replace("_name_", self.name.rpartition("/")[2])
        joined = ".".join(filter(None, (parent, package)))
        _, marker, behind = joined.rpartition("_global_")
        return behind[1:] if marker else joined

    def override_key(self, base: str, parent: str) -> str:
        """What the choice is called on the command line: `actor@actor_rollout_ref.actor`."""
        group, package = self.group_path(base), self.final_package(base, parent, None)
        return group if package == group.replace("/", ".") else f"{group}@{package or '_global_'}"


@dataclass(frozen=True)
class Place:
    """A file that takes part, and where it is placed in the tree."""

    # Relative to the folders, without suffix: `actor/dp_actor`.
    path: str
    package: str
    # Override key, for a group's choice.
    key: str | None = None


@dataclass(frozen=True)
class ConfigFile:
    """One file, read."""

    file: Path
    values: Any
    defaults: tuple[Item, ...]
    # The package in its first line, `# @package _global_`.
    header: str | None


class ConfigFiles:
    """The files in some folders; of files of the same name the one in the first folder counts."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self._read: dict[str, ConfigFile | None] = {}

    def read(self, path: str) -> ConfigFile | None:
        """None where there is no such file."""
        if path not in self._read:
            name = path if path.endswith((".yaml", ".yml")) else f"{path}.yaml"
            file = next((folder / name for folder in self.folders if (folder / name).is_file()), None)
            self._read[path] = _read_file(file, path) if file is not None else None
        return self._read[path]

    def options(self, group: str) -> list[str]:
        return sorted({file.stem for folder in self.folders for file in (folder / group).glob("*.yaml")})


def _read_file(file: Path, path: str) -> ConfigFile:
    values = read_yaml(file)
    lines = values.pop("defaults", []) if isinstance(values, dict) else []
    if not isinstance(lines, list):
        kind = "mapping" if isinstance(lines, dict) else type(lines).__name__
        raise ComposeError(f"Invalid defaults list in '{path}', defaults must be a list (got {kind})")
    return ConfigFile(file, values, tuple(_item(line, path) for line in lines), _header(file))


def _header(file: Path) -> str | None:
    """The package in the comment lines before the first line of another kind."""
    with file.open(encoding="utf-8") as stream:
        start = stream.read(_HEADER_BYTES)
    for line in filter(None, map(str.strip, start.splitlines())):
        words = line.lstrip("#").split()
        if not re.match(r"#\s*@", line):
            break
        if len(words) < 2:
            raise ComposeError(f"Expected header format: KEY VALUE, got '{line.lstrip('#').strip()}'")
        if len(words) > 2:
            raise ComposeError(f"Too many components in '{line.lstrip('#').strip()}'")
        if words[0] == "@package" and words[1] != "_group_":
            # A header is meant from the top of the tree, an `@package` in a list from the file that holds the list.
            return words[1] if words[1].split(".")[0] == "_global_" else f"_global_.{words[1]}"
    return None


def _item(line: Any, path: str) -> Item:
    if isinstance(line, str):
        name, _, package = line.partition("@")
        return Item(name, package=package or None)
    if not isinstance(line, dict):
        raise ComposeError(f"Unsupported type in defaults : {type(line).__name__}")
    if len(line) != 1:
        what = "Too many keys in default item" if line else "Missing group name in"
        raise ComposeError(f"In {path}: {what} {line}")
    ((key, value),) = line.items()
    if value is not None and not isinstance(value, str | list):
        raise ComposeError(f"Unsupported item value in defaults : {type(value).__name__}. Supported: string or list")
    for part in value if isinstance(value, list) else []:
        if not isinstance(part, str):
            kind = type(part).__name__
            raise ComposeError(f"Unsupported item value in defaults : {kind}, nested list items must be strings")
    before, _, package = key.partition("@")
    *words, group = before.split(" ")
    # A choice of Hydra's own groups always replaces one that Hydra makes.
    override = "override" in words or group.startswith("hydra/")
    return Item(value, group, package or None, optional="optional" in words, override=override)


@dataclass
class DefaultsList:
    """Follows the lists from the main file on. Choices that come later in a list are decided first, so that an
    `override` in a nested file holds for the files before it."""

    files: ConfigFiles
    # Override key -> (choice, the file with this `override`; None for the command line).
    overrides: dict[str, tuple[str | list[str] | None, str | None]] = field(default_factory=dict)
    appended: list[Item] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    # Override key -> choice.
    chosen: dict[str, str | None] = field(default_factory=dict)

    def choose(self, choice: str) -> None:
        """Take a choice of the command line: `group=name`, `group@package=name` or `+group=name`."""
        key, _, value = choice.removeprefix("+").partition("=")
        if value == "null":
            raise ComposeError("Config group override must be a string or a list. Got NoneType")
        group, _, package = key.partition("@")
        if choice.startswith("+"):
            self.appended.append(Item(value, group, package or None, appended=True))
        else:
            self.overrides[key] = (value, None)

    def places(self, main: str) -> list[Place]:
        """All files, those that others are laid over first."""
        if self.files.read(main) is None:
            raise ComposeError(
                f"Cannot find primary config '{main}'. Check that it's in your config search path.\n"
                f"{self._describe_search_path()}"
            )
        found = self._follow(Item(main), "", "", ())
        keys = [place.key for place in found if place.key is not None]
        if doubled := next((key for place, key in enumerate(keys) if key in keys[:place]), None):
            raise ComposeError(f"{doubled} appears more than once in the final defaults list")
        self._check_overrides_used()
        return found

    def _follow(self, item: Item, base: str, parent: str, above: tuple[str, ...]) -> list[Place]:
        """The files that one line brings in; `above` are the files that led to it."""
        is_main = not above
        key = item.override_key(base, parent) if item.group is not None else None
        if key is not None:
            self._note_choice(item, key)
        if item.name is None:
            return []
        path = item.config_path(base)
        if path.endswith("???"):
            listed = "\n".join(f"\t{option}" for option in self.files.options(item.group_path(base)))
            raise ComposeError(f"You must specify '{key}', e.g, {key}=<OPTION>\nAvailable options:\n{listed}")
        loaded = self.files.read(path)
        if loaded is None and item.optional:
            return []
        if loaded is None:
            raise ComposeError(self._not_found(item, base, path, above[-1]))
        if path in above:
            raise ComposeError(f"{' -> '.join([*above, path])}: a file cannot be in its own defaults list")
        package = item.final_package(base, parent, loaded.header)
        own = Place(path, package, key)
        lines = self._with_self(list(loaded.defaults), loaded, path, is_main)
        lines += self.appended if is_main else []
        inside = path.rpartition("/")[0]
        self._take_overrides(lines, inside, package, path)
        groups: list[list[Place]] = []
        deferred: list[tuple[int, Item]] = []
        for line in reversed([line for line in lines if not line.override]):
            if line.name == "_self_":
                groups.append([replace(own, key=None)])
                continue
            for part in reversed(list(self._single_choices(line, inside, package, path))):
                groups.append([])
                if isinstance(part.name, str) and "${" in part.name:  # the other choices must be known first
                    deferred.append((len(groups) - 1, part))
                else:
                    groups[-1] = self._follow(part, inside, package, (*above, path))
        for at, part in deferred:
            groups[at] = self._follow(replace(part, name=self._resolve(part)), inside, package, (*above, path))
        if not any(line.name == "_self_" for line in lines):
            return [*(place for group in reversed(groups) for place in group)] or [own]
        return [place for group in reversed(groups) for place in group]

    def _with_self(self, lines: list[Item], loaded: ConfigFile, path: str, is_main: bool) -> list[Item]:
        """The list with `_self_` in it, behind the others where the file does not say."""
        count = sum(line.name == "_self_" for line in lines)
        if count > 1:
            raise ComposeError(f"Duplicate _self_ defined in {path}")
        others = any(not line.override for line in lines)
        if count or not (others or (is_main and self.appended and not lines)):
            return lines
        if is_main and others and loaded.values:
            warnings.warn(
                f"In '{path}': Defaults list is missing `_self_`. See {_SELF_WARNING} for more information",
                UserWarning,
                stacklevel=2,
            )
        return [*lines, Item("_self_")]

    def _single_choices(self, line: Item, base: str, parent: str, path: str) -> Iterator[Item]:
        """The line with the choice that holds; several choices of a group are so many files."""
        if line.group is not None and (key := line.override_key(base, parent)) in self.overrides:
            self.used.add(key)
            line = replace(line, name=self.overrides[key][0])
        if not isinstance(line.name, list):
            yield line
            return
        for name in line.name:
            if "${" in name:
                raise ComposeError(f"In '{path}': Defaults List interpolation is not supported in options list items")
            yield Item(f"{line.group}/{name}", None, line.package, line.optional)

    def _take_overrides(self, lines: list[Item], base: str, parent: str, path: str) -> None:
        last: Item | None = None
        for line in lines:
            if line.name == "_self_":
                continue
            if last is not None and not (line.override or line.appended):
                was, now = last.override_key(base, parent), line.override_key(base, parent)
                raise ComposeError(
                    f"In {path}: Override '{was} : {last.name}' is defined before '{now}: {line.name}'.\n"
                    "Overrides must be at the end of the defaults list"
                )
            if line.override:
                last = None if str(line.group).startswith("hydra/") else line
                self.overrides.setdefault(line.override_key(base, parent), (line.name, path))

    def _note_choice(self, item: Item, key: str) -> None:
        name = item.name if isinstance(item.name, str) else None
        if self.chosen.setdefault(key, name) != name:
            raise ComposeError(
                f"Multiple values for {key}. To override a value use 'override {key}: {self.chosen[key]}'"
            )

    def _resolve(self, item: Item) -> str:
        """A choice that names others: `db_${server}`."""
        text = str(item.name)

        def choice(match: re.Match[str]) -> str:
            if (found := self.chosen.get(match[1])) is not None:
                return found
            keys = f", possible interpolation keys: {', '.join(self.chosen)}" if self.chosen else ""
            raise ComposeError(f"Error resolving interpolation '{text}'{keys}")

        return _REFERENCE.sub(choice, text)

    def _check_overrides_used(self) -> None:
        for key, (value, said_in) in self.overrides.items():
            if key in self.used:
                continue
            others = sorted(one for one in self.chosen if one.split("@")[0] == key.split("@")[0])
            meant = f"\nDid you mean to override {'one of ' if len(others) > 1 else ''}{', '.join(others)}?"
            what = f"Could not override '{key}'." + (meant if others else " No match in the defaults list.")
            if said_in is not None:
                raise ComposeError(f"In '{said_in}': {what}")
            raise ComposeError(f"{what}\nTo append to your default list use +{key}={value}")

    def _not_found(self, item: Item, base: str, path: str, above: str) -> str:
        if item.group is None:
            what = f"Could not load '{path}'.\n"
        else:
            group = item.group_path(base)
            listed = "\n".join(f"\t{option}" for option in self.files.options(group))
            what = f"Could not find '{path}'\n" + (f"\nAvailable options in '{group}':\n{listed}" if listed else "")
        return f"In '{above}': {what}\n{self._describe_search_path()}"

    def _describe_search_path(self) -> str:
        lines = [f"\tprovider=posttrain, path=file://{folder}" for folder in self.files.folders]
        return "\n".join(["Config search path:", *lines, "\tprovider=schema, path=structured://"])


def merge_trees(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Mappings are merged, all else is replaced; `???` replaces nothing."""
    for key, value in above.items():
        old = below.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merge_trees(old, value)
        elif value != "???" or key not in below:
            below[key] = value
    return below


def place_at(values: dict[str, Any], package: str) -> dict[str, Any]:
    """The values of a file under the sections of its package."""
    for name in reversed(package.split(".") if package else []):
        values = {name: values}
    return values
