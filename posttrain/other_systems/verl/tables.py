"""All rules, in the order in which they are tried."""

from __future__ import annotations

from functools import cache

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
