"""What merged values stand for: references and variables are replaced, then every value gets its declared type."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from posttrain.config.merge import Merged
from posttrain.config.problem import Problem
from posttrain.config.values import WrongValue, convert, describe_hint, shown
from posttrain.errors import first_line

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
                merged.problems.append(Problem(what, entry.where(key), "set the variable, or write the path", (key,)))
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
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    config = OmegaConf.create(tree)
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
            merged.problems.append(Problem(f"`{key}`: {flat[key]!r} cannot be resolved: {first}.", where, do, (key,)))
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
                merged.problems.append(Problem(what, entry.where(key), do, (key,)))
            merged.bad.add(key)
            del merged.entries[key]
