"""The user's own main file, which a command of verl names (`--config-name=mine`): found on disk, read as settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.config.commandline import CommandLine
from posttrain.other_systems.verl.renamed import MAINS
from posttrain.yaml_text import read_yaml

_WORKING_FOLDER = re.compile(r"^(\$\(pwd\)|\$\{?PWD\}?|`pwd`|\.)/")
_BUILT_IN = ("ppo_trainer", "sft_trainer", *MAINS)


def main_file(line: CommandLine) -> str | None:
    """The main file that the command names, as it is written; None where it is one that posttrain knows."""
    name = (line.config_name or _BUILT_IN[0]).removesuffix(".yaml")
    return None if name in _BUILT_IN else "/".join(filter(None, [line.config_path or line.config_dir, f"{name}.yaml"]))


def find_main_file(line: CommandLine, folder: Path) -> Path | None:
    """The file on disk. Scripts are started from the root of a project, so every folder above the script is tried."""
    if (name := main_file(line)) is None:
        return None
    inside = _WORKING_FOLDER.sub("", name)
    above = folder.resolve()
    return next((file for base in (above, *above.parents) if (file := base / inside).is_file()), None)


def settings_of_file(file: Path) -> list[str]:
    """What the file sets, as `key=value`; its `defaults:` count as far as they choose something. A ValueError for a
    file that holds no keys."""
    import yaml

    try:
        found = read_yaml(file)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, dict):
        raise ValueError("it holds no keys")
    own = {key: value for key, value in found.items() if key not in ("defaults", "hydra")}
    return [*_chosen(found.get("defaults") or []), *_flat(own)]


def _chosen(defaults: list[Any]) -> Iterator[str]:
    """`- override model_engine: megatron` is `model_engine=megatron`; verl's main files stand for what they set."""
    for one in defaults:
        if isinstance(one, dict):
            yield from (f"{str(group).split()[-1]}={value}" for group, value in one.items())
        elif one in MAINS:
            yield from MAINS[one][1]


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value if isinstance(value, str) else json.dumps(value)}"
