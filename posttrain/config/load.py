"""load_config: command line, files, flags and environment variables become one checked, typed configuration.

References and variables in merged values are replaced, then every value gets its declared type.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.config.check import check_one_process
from posttrain.config.checked import Checked, checks_of_packages, idle_settings
from posttrain.config.choices import EXTERNAL, load_own_algorithms
from posttrain.config.commandline import CommandLine, add_override, find_lost_lines, parse_options
from posttrain.config.compose import PACKAGE_TREE, Composed, add_files, compose, find_folders, known_choices
from posttrain.config.derived import take_adapter
from posttrain.config.environment import check_environment, check_torchrun, missing_notes, torchruns_settings
from posttrain.config.merge import Entry, Merged
from posttrain.config.resolved import ConfigError, Problem, Resolved
from posttrain.config.schema import KINDS, assign, nest, place_declared_settings
from posttrain.config.trainer import TORCHRUN
from posttrain.config.trees import PPO, Tree
from posttrain.config.values import WrongValue, convert, describe_hint, shown
from posttrain.errors import first_line, working_folder

_NOT_THE_USERS = ("default", "preset")
# The highest rank.
_COMMAND_LINE = 10**6


def load_config(
    args: Sequence[str] | Mapping[str, Any],
    *,
    labelled: Sequence[tuple[str, str]] = (),
    environment: bool = False,
    provided: Iterable[str] = (),
    cwd: str | Path | None = None,
    tree: Tree = PPO,
) -> Resolved:
    """The configuration that these arguments mean; raises ConfigError with all problems.

    args: the command line as a list of strings, or a dict (nested, or with dotted keys) from a Python caller. In a dict
        that holds the whole tree, values equal to the default do not count as set by the user.
    labelled: (override, source) pairs of lower rank than `args`, lowest first. A source that begins with "default" or
        "preset" does not count as set by the user.
    environment: also check files, packages and devices of this machine, and report those problems with the others.
    provided: keys whose value the caller hands over as a Python object, such as "data.train_files".
    tree: which program's settings these are.
    """
    started = torchruns_settings() if environment else {}
    labelled = [*labelled, *((f"{key}={value}", TORCHRUN) for key, value in started.items())]
    folder = Path(cwd) if cwd is not None else working_folder()
    resolved = _load(args, labelled, environment, frozenset(provided), folder, tree)
    check_torchrun(resolved, started)
    return resolved


def _load(
    args: Sequence[str] | Mapping[str, Any],
    labelled: Sequence[tuple[str, str]],
    environment: bool,
    provided: frozenset[str],
    folder: Path,
    tree: Tree,
) -> Resolved:
    if not args and not labelled and not isinstance(args, Mapping):
        raise ConfigError([tree.nothing_given])
    line, given, composed = _read(args, labelled, environment, folder, tree)
    # Before keys are looked up: an algorithm that was registered in this process may have added settings to a section.
    place_declared_settings()
    named = composed.values | {tree.canonical(key).key or key: value for key, value, *_ in [*line.values, *given]}
    # A file of the user's is imported here only if an algorithm or a key is unknown without it.
    failed = load_own_algorithms(named, named.keys() - tree.leaves.keys(), folder)
    merged = Merged(tree, problems=list(line.problems))
    merged.undeclared = tuple(kind.prefix for kind in KINDS) if failed else ()
    _merge(merged, line, given, composed)
    for what in failed:
        where = merged.where(EXTERNAL) if merged.is_set(EXTERNAL) else "found in the working folder"
        merged.refuse(what, where, "correct the file; the settings that it declares are not known without it", EXTERNAL)
    # The order matters from here on: other systems' keys become settings, then references are resolved, then values get
    # their types, and only then can settings follow from others.
    tree.dialect.apply(merged)
    resolve_references(merged)
    convert_types(merged)
    take_adapter(merged, folder, tree.model, tree.heads)
    tree.derive(merged, provided)
    tree.check_names(merged, folder)
    resolved = _finish(merged, line, composed.main_file)
    return _judge(resolved, merged, provided, environment, folder, tree, whole=not line.misses_files)


def _read(
    args: Sequence[str] | Mapping[str, Any],
    labelled: Sequence[tuple[str, str]],
    environment: bool,
    folder: Path,
    tree: Tree,
) -> tuple[CommandLine, list[tuple[str, Any]], Composed]:
    """(the command line, the pairs of a dict, the files' tree); problems are collected in the command line."""
    is_mapping = isinstance(args, Mapping)
    line, overrides = parse_options([] if is_mapping else args, tree.main)
    if environment and not is_mapping:
        # Only where a machine's checks are wanted, too: it reads the script of the shell above this process.
        line.problems += find_lost_lines(args)
    labelled = [*tree.dialect.main_file(line, folder), *labelled]
    try:
        folders, name = find_folders(line, folder, tree.main)
    except ConfigError as error:
        line.misses_files = True
        line.problems += error.problems
        # Loading continues with the built-in files, so that one answer names the missing file and all other mistakes.
        folders, name = [PACKAGE_TREE], tree.main

    def is_group(group: str) -> bool:
        return tree.dialect.answer(group) is None and any(
            (root / group).is_dir() and any((root / group).glob("*.yaml")) for root in folders
        )

    for text, source in [*labelled, *((text, "command line") for text in overrides)]:
        add_override(line, text, source, is_group)
    given = _from_mapping(args, line, is_group, tree) if is_mapping else []
    return line, given, _compose(line, folders, name, folder, tree)


def _merge(merged: Merged, line: CommandLine, given: Sequence[tuple[str, Any]], composed: Composed) -> None:
    """Add the values of files, flags, variables, command line and dict, each with its source and rank."""
    add_files(merged, composed)
    rank = len(composed.layers)
    for key, text, source in _last_words(line.values):
        rank += source != "command line"  # each flag and variable has its own rank; the command line is one
        at = _COMMAND_LINE if source == "command line" else rank
        merged.add(Entry(text, key, source, at, explicit=not source.startswith(_NOT_THE_USERS)))
    table = merged.names.leaves
    # A program that passes on a complete tree has set nothing by that: values at their defaults must stay free to
    # follow from other settings.
    whole_tree = set(table) <= {key for key, _ in given}
    for key, value in given:
        explicit = not (whole_tree and key in table and value == table[key].default)
        merged.add(Entry(value, key, "overrides" if explicit else "default", _COMMAND_LINE, explicit))
    for key, source in line.removed:
        merged.remove(key, source)


def _last_words(values: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Of a key that stands more than once on the command line the last value counts, as in Hydra: settings behind a
    script replace its own, also where the script uses two spellings of one setting."""
    last = {key: place for place, (key, text, source) in enumerate(values) if source == "command line" and text}
    return [one for place, one in enumerate(values) if last.get(one[0], place) == place or one[2] != "command line"]


def _compose(line: CommandLine, folders: list[Path], name: str, cwd: Path, tree: Tree) -> Composed:
    """The files' tree. What cannot be read is a problem, and the rest is read all the same: one answer names all."""
    last = {group.lstrip("+").partition("=")[0]: (group, source) for group, source in line.groups}  # the last one wins
    choices, unknown = known_choices(list(last.values()), folders)
    line.problems += unknown
    line.misses_files = line.misses_files or bool(unknown)
    try:
        return compose(folders, name, choices, cwd, tree)
    except ConfigError as error:
        line.misses_files = True
        line.problems += error.problems
        return compose([PACKAGE_TREE], tree.main, [], cwd, tree)


def _from_mapping(args: Mapping[str, Any], line: CommandLine, is_group: Any, tree: Tree) -> list[tuple[str, Any]]:
    """(key, value) pairs of a dict; group choices go to `line`."""
    pairs = []
    plain = _plain({key: value for key, value in args.items() if key != "hydra"})
    for key, value in tree.flatten(plain).items():
        if "." not in key and isinstance(value, str) and is_group(key):
            line.groups.append((f"{key}={value}", "overrides"))
        else:
            pairs.append((key, value))
    return pairs


def _plain(value: Any) -> Any:
    """Mappings of any kind as dicts, paths and other objects that are not data as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _finish(merged: Merged, line: CommandLine, main_file: str) -> Resolved:
    """The typed tree, with sources."""
    table = merged.names.leaves
    sources = {key: merged.where(key) for key in table}
    values = {key: entry.value for key, entry in merged.entries.items() if key in table}
    config = merged.names.root()
    for key, value in values.items():
        assign(config, key, value)
    explicit = {key for key in merged.entries if merged.is_set(key)}
    asked = "help" if line.help else line.cfg
    return Resolved(
        config, sources, merged.notes, explicit, main_file, merged.extra, asked, merged.node_rank, merged.dry_run
    )


def _judge(
    resolved: Resolved,
    merged: Merged,
    provided: frozenset[str],
    environment: bool,
    cwd: Path,
    tree: Tree,
    *,
    whole: bool,
) -> Resolved:
    """Run the checks of meaning (and of the machine); raise all problems at once.

    whole: whether all files were read; if not, only what the user set himself can be judged.
    """
    # A copy: the run gets the objects, the checks get a placeholder for them.
    seen = copy.deepcopy(resolved.config)
    for key in provided:
        assign(seen, key, "given in Python")  # so that no check takes it for unset
    # All of them run: a user corrects every mistake of a command at once.
    checks = (*tree.checks, *checks_of_packages("check"), check_one_process)
    checked = Checked(seen, resolved.explicit, resolved.where)
    findings = [finding for examine in checks for finding in examine(checked)]
    found = [one for one in findings if isinstance(one, Problem)]
    notes = [one for one in findings if isinstance(one, str)]
    problems: list[Problem] = list(merged.problems)
    # A value that could not be read fell back to its default; what the checks say about that would confuse.
    known = {key for problem in problems for key in problem.keys} | merged.bad
    found = [problem for problem in found if not known.intersection(problem.keys)]
    if not whole:
        # Values from files that could not be read are missing here, so that checks of them would be wrong.
        found = [problem for problem in found if problem.keys and resolved.explicit.issuperset(problem.keys)]
    problems += found
    if environment:
        problems += check_environment(resolved, cwd)
    if problems:
        # Each problem once: two checks may find the same one.
        raise ConfigError(dict.fromkeys(problems))
    for section in dict.fromkeys(key.split(".")[0] for key in resolved.extra):
        resolved.notes.append(f"The section `{section}` is your own: it is read only through ${{{section}.KEY}}.")
    resolved.notes += [
        *notes,
        *idle_settings(seen, resolved.explicit),
        *(missing_notes(resolved) if environment else ()),
    ]
    resolved.notes = list(dict.fromkeys(resolved.notes))
    return resolved


_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_UNSET_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def resolve_references(merged: Merged) -> None:
    """Replace `${section.key}`, `${oc.env:NAME}`, `${NAME}` and `$NAME` by what they stand for."""
    if any("${" in str(entry.value) for entry in merged.entries.values()) or "${" in str(merged.extra):
        _resolve_interpolations(merged)
    table = merged.names.leaves
    for key, entry in merged.entries.items():
        leaf = table.get(key)  # a derived key has none
        if "$" in str(entry.value) and not (leaf and leaf.is_literal):
            entry.value = _in_texts(entry.value, os.path.expandvars)
            if leaf and leaf.is_path and (unset := _UNSET_VARIABLE.search(str(entry.value))):
                what = f"`{key}` uses the environment variable {unset[0]}, which is not set."
                merged.refuse(what, entry.where(key), "set the variable, or write the path", key)
                merged.bad.add(key)


def _in_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_in_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {name: _in_texts(item, change) for name, item in value.items()}
    return value


def _resolve_interpolations(merged: Merged) -> None:
    # Imported here: a configuration without `${...}` does not pay for it.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # Defaults too: a reference may point to a setting that is not set.
    flat = {leaf.key: leaf.default for leaf in merged.names.leaves.values()}
    flat |= {key: _rename(merged, entry.value) for key, entry in merged.entries.items()}
    flat |= {key: _rename(merged, value) for key, value in merged.extra.items()}
    config = OmegaConf.create(nest(flat, {}))
    for key in [*merged.entries, *merged.extra]:
        if "${" not in str(flat[key]):
            continue
        try:
            value = OmegaConf.select(config, key, throw_on_missing=True)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            first = first_line(error)
            where = merged.entries[key].where(key) if key in merged.entries else "your own section"
            do = "refer to a key of the tree as `${section.key}`, to a variable as `${oc.env:NAME}`"
            merged.refuse(f"`{key}`: {flat[key]!r} cannot be resolved: {first}.", where, do, key)
            merged.bad.add(key)
            continue
        if key in merged.entries:
            merged.entries[key].value = value
        else:
            merged.extra[key] = value


def _rename(merged: Merged, value: Any) -> Any:
    """References written with another spelling, or naming an environment variable, in the form that OmegaConf reads."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        # `${HOME}` is the shell's form; a key is written in small letters.
        if name.isupper() and "." not in name:
            return f"${{oc.env:{name}}}"
        return f"${{{merged.names.canonical(name).key or name}}}"

    return _in_texts(value, lambda text: _REFERENCE.sub(replace, text))


def convert_types(merged: Merged) -> None:
    """Give every entry its declared type; a value that does not fit is a problem and falls back to the default."""
    derived, table = merged.names.derived, merged.names.leaves
    for key in list(merged.entries):
        entry = merged.entries[key]
        hint = derived[key] if key in derived else table[key].hint
        try:
            if key in merged.bad:
                raise WrongValue("")
            entry.value = convert(entry.value, hint)
            if key in table and table[key].is_path:
                entry.value = _in_texts(entry.value, os.path.expanduser)
        except WrongValue as error:
            if key not in merged.bad:
                text = str(error) if shown(key, entry.value) != "***" else "the value does not fit its type"
                what = f"`{entry.spelling}`: {text}."
                about = f" ({table[key].sentence})" if key in table else ""
                do = f"give {describe_hint(hint)}{about}"
                merged.refuse(what, entry.where(key), do, key)
            merged.bad.add(key)
            del merged.entries[key]
