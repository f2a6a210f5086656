"""Checks of the critic and of the reward model: what each needs, and settings of theirs that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from posttrain.config.checked import Checked, Finding
from posttrain.config.choices import CRITIC_ESTIMATORS


def _critic(checked: Checked) -> Iterator[Finding]:
    config = checked.config
    if config.algorithm.adv_estimator in CRITIC_ESTIMATORS and config.critic.model.path is None:
        yield "critic.model.path is not set: the critic starts from the actor's model, with a value head of zeros."


def _reward_model(checked: Checked) -> Iterator[Finding]:
    config = checked.config.reward_model
    if not config.enable:
        return
    if config.model.path is None:
        what = "A reward model is asked for (reward_model.enable=True), but none is named."
        do = "set reward_model.model.path to a folder or hub id, or reward_model.enable=False for a function reward"
        yield checked.problem(what, do, "reward_model.enable", "reward_model.model.path")
    if config.weight == 0:
        what = "reward_model.weight=0: the reward model would be computed and would not count."
        yield checked.problem(what, "give another weight, or reward_model.enable=False", "reward_model.weight")


VALUE_CHECKS: list[Callable[[Checked], Iterator[Finding]]] = [_critic, _reward_model]
