"""The answers to all settings of one command of verl, with the values that they have there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import NamedTuple

from posttrain.config.choices import ROLLOUT_ENGINES
from posttrain.config.merge import Merged, Source, Spellings
from posttrain.config.tree import Tree
from posttrain.other_systems.verl.apply import apply_answers
from posttrain.other_systems.verl.rule import HONOURED, NOT_SUPPORTED, TRANSLATED

UNKNOWN = "unknown"
_ENGINE = "actor_rollout_ref.rollout.name"
_READ_BY_ALGORITHMS = ("algorithm.", "actor_rollout_ref.actor.")
_ADDED = (
    "a key added for an algorithm of your own; `python3 -m verl.trainer.main_ppo` of the package posttrain-verl hands "
    "it to estimators and losses registered for verl"
)


# Rollout engines that are packages of the same name -> what they call themselves.
PACKAGES = {"vllm": "vLLM", "sglang": "SGLang"}


def is_installed(package: str) -> bool:
    """Nothing is imported to find out."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def can_generate(engine: str) -> bool:
    """Whether there is an engine of this name, and its package is installed."""
    return engine in ROLLOUT_ENGINES and (engine not in PACKAGES or is_installed(engine))


class Answered(NamedTuple):
    """One setting of a command, and what becomes of it."""

    setting: str
    key: str
    kind: str
    says: str


def answer_all(settings: Iterable[str], tree: Tree) -> list[Answered]:
    """The answer to each `key=value`; the last value of a key counts."""
    last = {_pair(setting)[1]: _pair(setting) for setting in settings}
    merged, pairs = Merged(tree.spellings), list(last.values())
    for _, key, value in pairs:
        merged.add(key, value, Source("script", 1))
    aside = apply_answers(merged)
    return [_answered(setting, key, value, aside, tree.spellings) for setting, key, value in pairs]


def _pair(setting: str) -> tuple[str, str, str]:
    key, _, value = setting.lstrip("+~").partition("=")
    return setting, key, value


def _answered(setting: str, key: str, value: str, aside: dict[str, tuple[str, str]], names: Spellings) -> Answered:
    if key in aside:
        return Answered(setting, key, *aside[key])
    if key.startswith("hydra."):
        return Answered(setting, key, NOT_SUPPORTED, "Hydra's own settings are off; remove it")
    found = names.canonical(key)
    if found.not_built:
        return Answered(setting, key, NOT_SUPPORTED, found.not_built)
    if found.key is None and setting.startswith("+") and key.startswith(_READ_BY_ALGORITHMS):
        return Answered(setting, key, NOT_SUPPORTED, _ADDED)
    if found.key is None:
        return Answered(setting, key, UNKNOWN, names.nearest(key))
    engine = value.strip("\"'")
    if found.key == _ENGINE and engine in PACKAGES and not is_installed(engine):
        missing = f"{PACKAGES[engine]} is not installed here; install it, or set {_ENGINE}=native"
        return Answered(setting, key, NOT_SUPPORTED, missing)
    if found.key == _ENGINE and engine not in ROLLOUT_ENGINES:
        return Answered(setting, key, NOT_SUPPORTED, f"this engine is not built; set {_ENGINE}=native")
    if found.key == key and names.leaf_of(key) is not None:
        return Answered(setting, key, HONOURED, "")
    return Answered(setting, key, TRANSLATED, f"`{found.key}`")
