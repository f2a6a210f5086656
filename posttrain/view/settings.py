"""How a run was made: its settings beside their defaults, differences between runs, and the command, versions and
machine of each start. Secrets are removed once more, because the files may come from anywhere."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from posttrain.texts import redact
from posttrain.tracking.origin import read_origin
from posttrain.tracking.rundir import flatten
from posttrain.tracking.safe_files import DamagedFile, read_settings

FILE = "config.yaml"
_SEED_OR_NAME = re.compile(
    r"(^|[._])seed$|^trainer\.(experiment_name|project_name|default_local_dir|resume_mode|resume_from_path|logger)$"
)


def settings(folder: Path) -> dict[str, str]:
    """By dotted key, as text; empty without a readable file."""
    return _read_settings(folder)[0]


def settings_problem(folder: Path) -> str | None:
    """Why the settings cannot be read; None if they can, or if there are none."""
    return _read_settings(folder)[1]


def family(folder: Path) -> str | None:
    """The same text for runs that differ only in seeds and folders; None without settings."""
    known = settings(folder)
    kept = sorted(item for item in known.items() if not _SEED_OR_NAME.search(item[0]))
    return hashlib.sha256(repr(kept).encode("utf-8", "replace")).hexdigest()[:12] if known else None


def _read_settings(folder: Path) -> tuple[dict[str, str], str | None]:
    # Read once per version of the file: the list of runs is requested again and again.
    path = folder / FILE
    try:
        facts = path.stat()
    except FileNotFoundError:
        return _read(path) if path.is_symlink() else ({}, None)
    except OSError:
        return _read(path)
    return _read_version(path, (facts.st_ino, facts.st_mtime_ns, facts.st_size))


@lru_cache(maxsize=2000)
def _read_version(path: Path, version: tuple[int, int, int]) -> tuple[dict[str, str], str | None]:
    return _read(path)


def _read(path: Path) -> tuple[dict[str, str], str | None]:
    try:
        return flat(redact(read_settings(path))), None
    except FileNotFoundError:
        return {}, None
    except DamagedFile as error:
        return {}, str(error)


def differences(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Every setting that is not the same in all runs: its key and one value per run, None where a run has none."""
    known = [settings(folder) for folder in folders.values()]
    keys = dict.fromkeys(key for one in known for key in one)
    rows = [(key, [one.get(key) for one in known]) for key in keys]
    return [{"key": key, "values": values} for key, values in rows if len(set(values)) > 1]


def flat(tree: Mapping[Any, Any]) -> dict[str, str]:
    """By dotted key, as text."""
    return {key: "" if value is None else str(value) for key, value in flatten(tree).items()}


FACTS = ("time", "step", "command", "folder", "host")
TABLES = ("versions", "hardware")


def details(folder: Path) -> dict[str, Any]:
    """`settings`: key, value, default and sentence of each, those that differ from the default first; and `starts`."""
    known = settings(folder)
    usual, sentences = _usual(known)
    rows = [
        {
            "key": key,
            "value": value,
            "default": usual.get(key),
            "changed": value != usual.get(key),
            "sentence": sentences.get(key, ""),
        }
        for key, value in known.items()
    ]
    rows.sort(key=lambda row: not row["changed"])
    return {"settings": rows, "problem": settings_problem(folder), "starts": list(map(_start, read_origin(folder)))}


def _start(found: dict[str, Any]) -> dict[str, Any]:
    # Only plain texts are passed on: the file may come from anywhere.
    facts = {name: str(found[name]) for name in FACTS if isinstance(found.get(name), str | int)}
    tables = {name: found.get(name) for name in TABLES}
    return facts | {name: flat(table) if isinstance(table, dict) else {} for name, table in tables.items()}


def _usual(known: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    # Defaults and sentences of the kind of run (RL, SFT, ...) that shares the most keys.
    return max(_trees(), key=lambda tree: len(known.keys() & tree[0].keys()))


@cache
def _trees() -> list[tuple[dict[str, str], dict[str, str]]]:
    from posttrain.config.root import PPOConfig
    from posttrain.config.schema import leaves
    from posttrain.config.trees import COMMANDS

    roots = [PPOConfig, *(tree.root for tree in COMMANDS.values())]
    return [(flat(root().to_dict()), {key: leaf.sentence for key, leaf in leaves(root).items()}) for root in roots]
