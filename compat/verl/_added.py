"""Settings that a command adds for its own algorithm: `+algorithm.my_key=0.5`, `+actor_rollout_ref.actor.my_key=0.5`,
`+actor_rollout_ref.actor.policy_loss.my_key=0.5`.

An estimator or a policy loss registered for verl finds them in its `config`. Workers are other processes: they read
them from the environment, which they take over. With an algorithm of posttrain's own nothing would read them: they are
then unknown settings, as a misspelt one is. `+data.my_key=5` is for the class of `data.custom_cls`, in its `config`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from posttrain.config.choices import ESTIMATORS, POLICY_LOSSES
from posttrain.config.trees import PPO
from posttrain.config.values import parse_yaml
from posttrain.other_systems.verl.answers import WORDS

_VARIABLE = "POSTTRAIN_VERL_ADDED"
_ESTIMATOR, _LOSS = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"
_SECTIONS = {
    "actor_rollout_ref.actor.policy_loss.": _LOSS,
    "actor_rollout_ref.actor.": _LOSS,
    "algorithm.": _ESTIMATOR,
}
"""Section -> the setting that names who reads its added keys."""


def take_added(args: list[str]) -> list[str]:
    """The arguments without those that only an algorithm of the user's own reads; these are kept for it."""
    chosen = {_ESTIMATOR: "gae", _LOSS: "vanilla"}
    chosen |= {key: value for arg in args for key, _, value in [arg.lstrip("+").partition("=")] if key in chosen}
    known = {_ESTIMATOR: {*ESTIMATORS, *(word for key, word in WORDS if key == _ESTIMATOR)}, _LOSS: {*POLICY_LOSSES}}
    own = {key for key, name in chosen.items() if name.strip("\"'") not in known[key]}
    added, rest = {}, []
    has_data_set = any(arg.lstrip("+").startswith("data.custom_cls.path=") for arg in args)
    for arg in args:
        key, _, value = arg.lstrip("+").partition("=")
        if has_data_set and arg.startswith("+data.") and _is_unknown(key):
            rest.append(f"data.custom_cls.config.{key.removeprefix('data.')}={value}")
            continue
        section = next((section for section in _SECTIONS if key.startswith(section)), None)
        if arg.startswith("+") and section and _SECTIONS[section] in own and _is_unknown(key):
            added[key] = parse_yaml(value)
        else:
            rest.append(arg)
    os.environ.pop(_VARIABLE, None)
    if added:
        os.environ[_VARIABLE] = json.dumps(added)
        print(f"note: {', '.join(added)}: handed to your algorithm in its `config`.")
    return rest


def added_to(section: str) -> dict[str, Any]:
    """The keys directly under a section."""
    given: dict[str, Any] = json.loads(os.environ.get(_VARIABLE, "{}"))
    names = {key.removeprefix(section): value for key, value in given.items() if key.startswith(section)}
    return {name: value for name, value in names.items() if "." not in name}


def _is_unknown(key: str) -> bool:
    found = PPO.canonical(key)
    return found.key is None and not found.not_built and PPO.dialect.answer(key) is None
