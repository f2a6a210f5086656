"""The YAML tree and docs/settings*.md, made from the settings classes; `scripts/generate.py` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from made_verl_page import verl_keys_page

from posttrain.config.choices import PRESETS
from posttrain.config.compose import PACKAGE_TREE
from posttrain.config.root import PPOConfig
from posttrain.config.schema import Leaf, Section, leaves, sections
from posttrain.config.trees import COMMANDS
from posttrain.yaml_text import one_line

DOCS_PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_MADE = "# Made by `python scripts/generate.py` from posttrain/config/*.py: change defaults there, not here."
_FSDP_KEYS = ("actor_rollout_ref.actor.strategy", "actor_rollout_ref.actor.fsdp_config.")

# Group file -> the section that the main file's defaults list places it at.
GROUPS: dict[str, str] = {
    "data/legacy_data": "data",
    "model/hf_model": "actor_rollout_ref.model",
    "actor/dp_actor": "actor_rollout_ref.actor",
    "rollout/rollout": "actor_rollout_ref.rollout",
    "ref/dp_ref": "actor_rollout_ref.ref",
    "critic/dp_critic": "critic",
    "algorithm/rollout_correction": "algorithm.rollout_correction",
}

_MAIN_HEAD = f"""{_MADE}
# The main file of every PPO-family run. Settings of the policy lie in the group files beside it; write them here,
# under `actor_rollout_ref:`, or on the command line to change them. `preset=embedded` and `algorithm=drgrpo` lay
# a preset over this file.
"""

_HYDRA = """
# Hydra's own run folder is off: posttrain writes its run directory itself.
hydra:
  run:
    dir: .
  output_subdir: null
"""


def files() -> dict[Path, str]:
    """Every generated file and its text."""
    made = {PACKAGE_TREE / "ppo_trainer.yaml": _main_text()}
    for group, section in GROUPS.items():
        made[PACKAGE_TREE / f"{group}.yaml"] = _group_text(group, section)
    actor = [leaf for leaf in _under("actor_rollout_ref.actor") if not leaf.key.startswith(_FSDP_KEYS)]
    head = f"{_MADE}\n# Base of the actor's settings; dp_actor.yaml inherits from it.\n\n"
    made[PACKAGE_TREE / "actor" / "actor.yaml"] = head + _yaml(actor, "actor_rollout_ref.actor.")
    for name, (sentence, values) in PRESETS.items():
        made[PACKAGE_TREE / f"{name}.yaml"] = _preset_text(sentence, values)
    made[DOCS_PAGE] = _page("Settings", PPOConfig, "posttrain config KEY=VALUE ...") + _presets_table()
    made[DOCS_PAGE.with_name("verl_keys.md")] = verl_keys_page()
    for verb, tree in COMMANDS.items():
        command, page = f"posttrain {verb}", f"settings_{verb.replace('-', '_')}.md"
        head = f"{_MADE}\n# The settings of `{command}`; write them on the command line to change them.\n\n"
        text = head + "defaults:\n  - _self_\n\n" + _yaml(leaves(tree.root).values(), "") + _HYDRA
        made[PACKAGE_TREE / f"{tree.main}.yaml"] = text
        made[DOCS_PAGE.parent / page] = _page(f"Settings of `{command}`", tree.root, f"{command} KEY=VALUE ... --help")
    return made


def heading_of(section: type) -> str:
    """The class's own docstring on one line, without its example."""
    text = " ".join((section.__doc__ or "").split())
    return text.split(" Example:")[0]


def _under(section: str) -> list[Leaf]:
    return [leaf for key, leaf in leaves(PPOConfig).items() if key.startswith(section + ".")]


def _main_text() -> str:
    lines = [_MAIN_HEAD, "defaults:"]
    for group, section in GROUPS.items():
        folder, name = group.split("/")
        lines.append(f"  - {folder}: {name}" if folder == section else f"  - {folder}@{section}: {name}")
    lines += ["  - _self_", "  - preset: null", "  - algorithm: null", ""]
    placed = tuple(section + "." for section in GROUPS.values())
    own = [leaf for key, leaf in leaves(PPOConfig).items() if not key.startswith(placed)]
    return "\n".join(lines) + "\n" + _yaml(own, "") + _HYDRA


def _group_text(group: str, section: str) -> str:
    head = f"{_MADE}\n# {heading_of(sections(PPOConfig)[section])} Composed at `{section}`.\n\n"
    own = _under(section)
    if group == "actor/dp_actor":
        head += "defaults:\n  - actor\n  - _self_\n\n"
        own = [leaf for leaf in own if leaf.key.startswith(_FSDP_KEYS)]
    return head + _yaml(own, section + ".")


def _preset_text(sentence: str, values: Mapping[str, Any]) -> str:
    table = leaves(PPOConfig)
    chosen = [Leaf(key, table[key].hint, value, object) for key, value in values.items()]  # without sentences
    order = list(table)
    # In the order of the tree: keys of one section must stand together to be nested.
    chosen.sort(key=lambda leaf: order.index(leaf.key))
    made = "# Made by `python scripts/generate.py` from posttrain/config/choices.py: change values there."
    return f"# @package _global_\n{made}\n# {sentence}\n\n" + _yaml(chosen, "")


def _yaml(chosen: Iterable[Leaf], prefix: str) -> str:
    """Nested YAML of these settings, keys relative to `prefix`, each under its sentence."""
    lines: list[str] = []
    open_sections: list[str] = []
    for leaf in chosen:
        *path, name = leaf.key[len(prefix) :].split(".")
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(open_sections, path, strict=False))
        for depth in range(len(list(shared)), len(path)):
            if depth == 0 and lines:
                lines.append("")
            lines.append(f"{'  ' * depth}{path[depth]}:")
        open_sections = path
        indent = "  " * len(path)
        if leaf.sentence:
            lines.append(f"{indent}# {leaf.sentence}")
        lines.append(f"{indent}{name}: {one_line(leaf.default)}")
    return "\n".join(lines) + "\n"


def _page(title: str, root: type[Section], command: str) -> str:
    """A page of docs/ with all settings of a program."""
    return (
        f"# {title}\n\nMade by `python scripts/generate.py` from the classes in `posttrain/config/`. Every "
        f"key with its default.\n`{command}` prints a run's values and where each was set.\n\n{_section_tables(root)}"
    )


def _presets_table() -> str:
    lines = ["## Presets", "", "| choice | sets |", "|---|---|"]
    for name, (sentence, values) in PRESETS.items():
        sets = ", ".join(f"`{key}={one_line(value)}`" for key, value in values.items())
        lines.append(f"| `{name.replace('/', '=')}` | {sentence} {sets} |")
    return "\n".join(lines) + "\n"


def _section_tables(root: type[Section]) -> str:
    """One table per section, with key, default and sentence."""
    lines: list[str] = []
    table = leaves(root)
    for name, section in sections(root).items():
        own = [leaf for key, leaf in table.items() if key.rsplit(".", 1)[0] == name]
        if not own:
            continue
        lines += [f"## {name}", "", heading_of(section), "", "| key | default | |", "|---|---|---|"]
        for leaf in own:
            sentence = leaf.sentence.replace("|", "\\|")
            lines.append(f"| `{leaf.key}` | `{one_line(leaf.default)}` | {sentence} |")
        lines.append("")
    return "\n".join(lines) + "\n"
