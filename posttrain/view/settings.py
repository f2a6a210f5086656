"""The settings of runs, and where they differ. Secrets are taken out again: the file may come from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.tracking.redact import redact


def settings(folder: Path) -> dict[str, str]:
    """By dotted key, as text; empty where there is no file that can be read."""
    try:
        tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError):
        return {}
    return _flat(redact(tree)) if isinstance(tree, Mapping) else {}


def differences(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Every setting that is not the same in all runs: its key and one value per run, None where a run has none."""
    known = [settings(folder) for folder in folders.values()]
    keys = dict.fromkeys(key for one in known for key in one)
    rows = [(key, [one.get(key) for one in known]) for key in keys]
    return [{"key": key, "values": values} for key, values in rows if len(set(values)) > 1]


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = "" if value is None else str(value)
    return found
