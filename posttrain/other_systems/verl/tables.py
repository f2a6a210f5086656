"""All rules in the order in which they are tried, and every key known of verl, by program."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from posttrain.other_systems.verl.actor import ACTOR_RULES
from posttrain.other_systems.verl.algorithm import ALGORITHM_RULES
from posttrain.other_systems.verl.rollout import ROLLOUT_RULES
from posttrain.other_systems.verl.rule import Rule, Rules
from posttrain.other_systems.verl.run import RUN_RULES
from posttrain.other_systems.verl.supervised import SUPERVISED_RULES

PPO_RULES: tuple[Rule, ...] = (*ACTOR_RULES, *ROLLOUT_RULES, *ALGORITHM_RULES, *RUN_RULES)


@cache
def _rules(supervised: bool) -> Rules:
    return Rules(SUPERVISED_RULES if supervised else PPO_RULES)


@cache
def find_rule(key: str, *, supervised: bool = False) -> Rule | None:
    """The first rule that knows the key."""
    return _rules(supervised).find(key)


KEYS_FILE = Path(__file__).with_name("keys.txt")


@cache
def verl_keys() -> dict[str, str]:
    """Every key known of verl -> its program: `main_ppo`, `sft_trainer` or `main_generation`."""
    keys, program = {}, ""
    for line in KEYS_FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            program = line.strip("[]")
        elif line and not line.startswith("#"):
            keys[line] = program
    return keys
