"""How a run was made: its settings beside their defaults, and the command, versions and machine of each start."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from posttrain.tracking.origin import read_origin
from posttrain.view.settings import flat, settings, settings_problem

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
    """Texts alone: the file may come from anywhere."""
    facts = {name: str(found[name]) for name in FACTS if isinstance(found.get(name), str | int)}
    tables = {name: found.get(name) for name in TABLES}
    return facts | {name: flat(table) if isinstance(table, dict) else {} for name, table in tables.items()}


def _usual(known: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Defaults and sentences by key, of the kind of run that these settings are of."""
    return max(_trees(), key=lambda tree: len(known.keys() & tree[0].keys()))


@cache
def _trees() -> list[tuple[dict[str, str], dict[str, str]]]:
    from posttrain.config.root import PPOConfig
    from posttrain.config.schema import leaves
    from posttrain.config.supervised_tree import COMMANDS

    roots = [PPOConfig, *(tree.root for tree in COMMANDS.values())]
    return [(flat(root().to_dict()), {key: leaf.sentence for key, leaf in leaves(root).items()}) for root in roots]
