"""The YAML files composed as Hydra does, with the file that each value came from.

The search path is the user's folder, then the package's own tree, so that a copied main file still finds its groups. A
user's file without a `defaults:` list is laid over the composed main file.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config.commandline import CommandLine
from posttrain.config.defaults_list import ConfigFile, ConfigFiles, DefaultsList, merge_trees, place_at
from posttrain.config.merge import Entry, Merged
from posttrain.config.resolved import ConfigError, Problem
from posttrain.spelling import suggest
from posttrain.yaml_text import read_yaml

if TYPE_CHECKING:
    from posttrain.config.merge import Spellings

PACKAGE_TREE = Path(__file__).resolve().parents[1] / "trainer" / "config"
_PRESET_GROUPS = ("preset", "algorithm")


@dataclass
class Layer:
    """One file of the composition."""

    label: str
    # Flat, by the key as the file spells it.
    values: dict[str, Any]
    # Whether what it sets counts as set by the user.
    explicit: bool
    # Keys of a file of the package's tree that this one is, or is a copy of: at their defaults they are not the user's.
    copied: frozenset[str] = frozenset()
    # The group's name, for a group of the user's that lies outside the known sections.
    own_section: str = ""


@dataclass
class Composed:
    """The result: the tree (flat, by spelling) and its files, lowest rank first."""

    values: dict[str, Any] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    main_file: str = ""

    def ranks(self) -> dict[str, int]:
        """Key -> index of the last file that sets it, something inside it, or something that it lies in."""
        last: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            for key in layer.values:
                last[key] = index
                last |= dict.fromkeys(_around(key), index)
        set_whole = {key: index for index, layer in enumerate(self.layers) for key in layer.values}
        return {key: max(last.get(key, 0), *(set_whole.get(one, 0) for one in _around(key)), 0) for key in self.values}


def _around(key: str) -> list[str]:
    """`a` and `a.b` of `a.b.c`."""
    return [key[:place] for place, char in enumerate(key) if char == "."]


def find_folders(line: CommandLine, cwd: Path, main: str) -> tuple[list[Path], str]:
    """(search path, name of the main file); raises ConfigError where a folder or file is missing."""
    folders: list[Path] = []
    name = (line.config_name or main).removesuffix(".yaml")
    if os.sep in name and (cwd / f"{name}.yaml").is_file():
        folders.append((cwd / name).parent)
        name = Path(name).name
    for option, given in (("--config-path", line.config_path), ("--config-dir", line.config_dir)):
        if given is not None:
            folders.append(_existing_folder(option, given, cwd))
    # A main file in the working folder needs no option; one in a named folder comes first.
    if line.config_path is None and not _holds(folders, name) and (cwd / f"{name}.yaml").is_file():
        folders.append(cwd)
    # Last, so that a user's file of the same name is found before the built-in one.
    folders.append(PACKAGE_TREE)
    if not _holds(folders, name):
        raise ConfigError([_missing_file(name, folders)])
    return folders, name


def _holds(folders: list[Path], name: str) -> bool:
    return any((folder / f"{name}.yaml").is_file() for folder in [*folders, PACKAGE_TREE])


def _existing_folder(option: str, given: str, cwd: Path) -> Path:
    given = os.path.expandvars(os.path.expanduser(given.removeprefix("file://")))
    tried = [cwd / given, PACKAGE_TREE.parent / given]
    for folder in tried:
        if folder.is_dir():
            return folder.resolve()
    places = " nor in ".join(str(folder) for folder in dict.fromkeys(tried))
    what = f"The folder `{given}` of `{option}` was found neither in {places}."
    do = "give a folder that exists, relative to the working folder or absolute"
    raise ConfigError([Problem(what, "command line", do)])


def _missing_file(name: str, folders: list[Path]) -> Problem:
    folders = list(dict.fromkeys(folders))
    there = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    searched = ", ".join(str(folder) for folder in folders)
    do = f"{suggest(name, there)}these are there: {', '.join(there) or 'none'}"
    return Problem(f"There is no `{name}.yaml` in {searched}.", "command line, --config-name", do)


def compose(folders: list[Path], name: str, groups: list[str], cwd: Path, names: Spellings) -> Composed:
    """The tree of this main file and these group choices; a file without `defaults:` is laid over the tree's own."""
    import yaml

    chosen = next(folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file())
    try:
        own = read_yaml(chosen)
        if not isinstance(own, dict):
            what = f"{_label(chosen, cwd)} holds no keys."
            raise ConfigError([Problem(what, "command line, --config-name", "write `section:` and keys under it")])
        lay_over = "defaults" not in own
        composed = _compose_once(folders, names.main if lay_over else name, groups, cwd, names)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ComposeError and OmegaConf's are ValueErrors
        what = f"The configuration files do not compose: {str(error).strip()}"
        raise ConfigError([Problem(what, _label(chosen, cwd), "correct the file")]) from None
    if lay_over:
        layer = Layer(
            _label(chosen, cwd), names.flatten({str(key): value for key, value in own.items()}), explicit=True
        )
        composed.layers.append(layer)
        for key in layer.values:
            # A section that is set whole (`multi_turn: null`) replaces what the files below said inside it.
            for inside in [k for k in composed.values if k.startswith(key + ".")]:
                del composed.values[inside]
        composed.values.update(layer.values)
    below = composed.main_file
    composed.main_file = f"{_label(chosen, cwd)} over {below}" if lay_over else below
    return composed


_built_in: dict[tuple[object, ...], Composed] = {}


def _compose_once(folders: list[Path], name: str, groups: list[str], cwd: Path, names: Spellings) -> Composed:
    """As `_compose`; the built-in tree alone is composed once per process as long as its files do not change."""
    if folders != [PACKAGE_TREE]:
        return _compose(folders, name, groups, cwd, names)
    # With the files' times: a developer who edits the tree in a notebook sees the change.
    files = [(file, file.stat()) for file in sorted(PACKAGE_TREE.rglob("*.yaml"))]
    key = (name, *groups, *((file, found.st_ino, found.st_mtime_ns, found.st_size) for file, found in files))
    if key not in _built_in:
        _built_in[key] = _compose(folders, name, groups, cwd, names)
    # A copy, because callers lay values over it.
    return copy.deepcopy(_built_in[key])


def _compose(folders: list[Path], name: str, groups: list[str], cwd: Path, names: Spellings) -> Composed:
    files = ConfigFiles(folders)
    defaults = DefaultsList(files)
    for choice in groups:
        defaults.choose(choice)
    composed, tree = Composed(), dict[str, Any]()
    for place in defaults.places(name):
        loaded = files.read(place.path)
        if loaded is None:
            continue
        layer = _layer(place.path, place.package, loaded, cwd, names)
        composed.layers.append(layer)
        composed.main_file = layer.label if place.path == name else composed.main_file
        if isinstance(loaded.values, dict):
            merge_trees(tree, copy.deepcopy(place_at(loaded.values, place.package)))
    tree.pop("hydra", None)
    composed.values = names.flatten(tree)
    return composed


def _layer(config_path: str, package: str, loaded: ConfigFile, cwd: Path, names: Spellings) -> Layer:
    own, file = loaded.values, loaded.file
    own = {str(key): value for key, value in own.items() if key != "hydra"} if isinstance(own, dict) else {}
    values = names.flatten(own, f"{package}." if package else "")
    group = config_path.rsplit("/", 1)[0] if "/" in config_path else ""
    in_package = file.is_relative_to(PACKAGE_TREE)
    if in_package and group in _PRESET_GROUPS and not package:
        # A preset is not the user's own word: settings that follow from others may still change what it set.
        return Layer(f"preset {Path(config_path).name}", values, explicit=False)
    same_name = PACKAGE_TREE / f"{config_path}.yaml"
    model = (
        same_name if same_name.is_file() else PACKAGE_TREE / f"{names.main if loaded.defaults else config_path}.yaml"
    )
    copied = frozenset(values) if in_package else _find_copied_keys(values, model, package, names)
    own_section = package if group and package == group.replace("/", ".") else ""
    return Layer(_label(file, cwd), values, explicit=True, copied=copied, own_section=own_section)


def _find_copied_keys(values: dict[str, Any], model: Path, package: str, names: Spellings) -> frozenset[str]:
    """The keys that a user's file shares with the package's file, if it is a copy of it: has most of its keys.

    What the user wrote in a file of a few keys, or added to a copy, is meant, also where it equals the default.
    """
    if not model.is_file():
        return frozenset()
    own = read_yaml(model)
    kept = {str(key): value for key, value in own.items() if key != "defaults"} if isinstance(own, dict) else {}
    there = names.flatten(kept, f"{package}." if package else "")
    shared = frozenset(there).intersection(values)
    return shared if 2 * len(shared) > len(there) else frozenset()


def _label(file: Path, cwd: Path) -> str:
    """A file as a user would name it: relative to the working folder or to the package, else absolute."""
    if file.is_relative_to(PACKAGE_TREE):
        return "posttrain/trainer/config/" + file.relative_to(PACKAGE_TREE).as_posix()
    return file.relative_to(cwd).as_posix() if file.is_relative_to(cwd) else str(file)


def known_choices(groups: list[tuple[str, str]], folders: list[Path]) -> tuple[list[str], list[Problem]]:
    """(choices whose files are there, problems of the others); `groups` are (choice as Hydra takes it, source)."""
    good, problems = [], []
    for group, source in groups:
        folder, _, choice = group.lstrip("+").partition("=")
        folder = folder.split("@")[0]
        options = sorted({f.stem for root in folders for f in (root / folder).glob("*.yaml")})
        if choice in options or choice == "null":
            good.append(group)
            continue
        options = [name for name in options if (folder, name) != ("algorithm", "rollout_correction")]
        hint = suggest(choice, options)
        if folder == "model" and not hint:  # the name of a model, which the group of that name does not take
            hint = f"a model to train is named by `actor_rollout_ref.model.path={choice}`; of the group are "
        what = f"`{group}`: the group `{folder}` has no `{choice}`."
        problems.append(Problem(what, source, f"{hint}known: {', '.join(options)}"))
    return good, problems


def add_files(merged: Merged, composed: Composed) -> None:
    """Take in what the files say."""
    ranks = composed.ranks()
    for key, value in composed.values.items():
        rank = ranks[key]
        layer = composed.layers[rank]
        found = merged.names.canonical(key)
        if found.key is None and found.answer is None and _keep_own_section(merged, key, value, layer):
            continue
        leaf = merged.names.leaves.get(key)
        unchanged = key in layer.copied and leaf is not None and value == leaf.default
        in_package = layer.label.startswith("posttrain/trainer/config/")
        source = "default" if unchanged and in_package else layer.label
        merged.add(Entry(value, key, source, rank, explicit=layer.explicit and not unchanged, is_file=True))


def _keep_own_section(merged: Merged, key: str, value: Any, layer: Layer) -> bool:
    """Whether the key belongs to a group of the user's own, which is kept for `${...}` references."""
    section = layer.own_section
    if not key.startswith(f"{section}.") or section.split(".")[0] in merged.names.sections:
        return False
    inner = key[len(section) + 1 :]
    if merged.names.canonical(inner).key is not None:
        what = f"`{inner}` stands in a group file, so that it becomes `{key}`, which nothing reads."
        merged.refuse(what, layer.label, "put `# @package _global_` in the file's first line")
    else:
        merged.extra[key] = value
    return True
