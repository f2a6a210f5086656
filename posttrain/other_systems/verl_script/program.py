"""The verl command in a script: which program, with which arguments, on how many devices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.config.commandline import CommandLine, parse_options
from posttrain.other_systems.verl.renamed import MAINS
from posttrain.other_systems.verl_script.shell import Script
from posttrain.yaml_text import read_yaml

# Last name of a module of verl -> the program here; every other `main_*` trains by RL.
_MODULES = {
    "sft_trainer": "sft",
    "fsdp_sft_trainer": "sft",
    "sft_trainer_ray": "sft",
    "main_generation": "generation",
    "main_generation_server": "generation",
    "main_eval": "evaluation",
}
# Stands for a reference that the script does not define.
FROM_OUTSIDE = "from_outside"
_PROCESSES = re.compile(r"^--n(?:proc)?[_-]per[_-]node(?:=(\S+))?$")
_MACHINES = re.compile(r"^--nnodes(?:=(\S+))?$")


@dataclass
class Call:
    """A command of verl."""

    module: str
    # `ppo`, `sft`, `generation` or `evaluation`.
    program: str
    # `key=value`, in order.
    settings: list[str]
    # Hydra's options, and what is wrong with the arguments as they stand.
    line: CommandLine
    # torchrun's options, as settings.
    launched: dict[str, str] = field(default_factory=dict)
    # References that the script itself does not define: `$WORLD_SIZE`, `$(date)`.
    outside: list[str] = field(default_factory=list)

    def is_open(self, setting: str) -> bool:
        """Whether the value depends on what the script takes from outside."""
        return any(text in setting.partition("=")[2] for text in self.outside)

    @property
    def is_main(self) -> bool:
        """Whether it is one of verl's own trainers, or posttrain's, not a recipe's."""
        return self.module.split(".")[0] in ("verl", "posttrain") and self.module.split(".")[-1] in (
            "main_ppo",
            *_MODULES,
        )

    def without_outside(self, setting: str) -> str:
        """The setting with a word in place of each reference that the script does not define."""
        for text in self.outside:
            setting = setting.replace(text, FROM_OUTSIDE)
        return setting


def find_calls(script: Script) -> list[Call]:
    """Every command of verl in the script."""
    calls = [call for words in script.commands if (call := _call(words)) is not None]
    for call in calls:
        call.outside = list(script.variables.unset)
    return calls


def _call(words: list[str]) -> Call | None:
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words) and _is_verl(words[place + 1]):
            return _read(words[place + 1], words[place + 2 :], words[:place])
        if re.search(r"(^|/)(main_\w+|\w*sft_trainer)\.py$", word):
            return _read(word.removesuffix(".py").replace("/", ".").lstrip("."), words[place + 1 :], words[:place])
    return None


def _is_verl(module: str) -> bool:
    return (
        module.split(".")[0] in ("verl", "recipe", "posttrain")
        or re.search(r"\.(main_\w+|\w*sft_trainer)$", module) is not None
    )


def _read(module: str, arguments: list[str], before: list[str]) -> Call:
    program = _MODULES.get(module.split(".")[-1], "ppo")
    # A word that is only a variable from outside (`$EXTRA_ARGS`) may hold any number of arguments, or none.
    known = [word for word in arguments if not word.startswith("$") or "=" in word]
    line, settings = parse_options(known)
    return Call(module, program, settings, line, _read_torchrun(before))


def _read_torchrun(before: list[str]) -> dict[str, str]:
    """torchrun's numbers of processes and machines."""
    found: dict[str, str] = {}
    for place, word in enumerate(before):
        for pattern, key in ((_PROCESSES, "trainer.n_gpus_per_node"), (_MACHINES, "trainer.nnodes")):
            if match := pattern.match(word):
                found[key] = match[1] or (before[place + 1] if place + 1 < len(before) else "")
    return found


# The user's own main file, which a command of verl names (`--config-name=mine`): found on disk, read as settings.


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
