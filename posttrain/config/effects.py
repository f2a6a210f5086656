"""Settings that the user set and that have no effect in this run, printed as notes.

Fields declare why they may have none (`setting(idle=...)`); what an algorithm reads, its own file declares.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posttrain.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES, critic_estimators
from posttrain.config.schema import ESTIMATOR_KIND, LOSS_KIND, leaves, lookup
from posttrain.settings import Idle

_ACTOR = "actor_rollout_ref.actor"
_VALUES: dict[str, Any] = {"False": False, "null": None, "0": 0}
# Keys (or prefixes that end in a dot), and why they do nothing.
Unread = tuple[tuple[str, ...], str]

# Setting of `algorithm` that several estimators read -> what they do with it.
SHARED_BY_ESTIMATORS = {
    "gamma": ("discounts", "discount", ""),
    "norm_adv_by_std_in_grpo": ("divides", "divide", "by the deviation of a group"),
}
# Settings of the actor that several policy losses read.
SHARED_BY_LOSSES = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def _unread_by_estimator(config: Any) -> Iterator[Unread]:
    """Settings that the chosen estimator does not read, by its declaration; one that declares nothing may read all."""
    chosen = ADV_ESTIMATORS.get(config.algorithm.adv_estimator)
    if chosen is None or chosen.reads is None:
        return
    if not chosen.needs_critic:
        own = [key for one in ADV_ESTIMATORS.values() if one.needs_critic for key in ESTIMATOR_KIND.own_keys(one)]
        reason = _only(critic_estimators(), "has", "have", "a critic")
        yield ("critic.", "trainer.critic_warmup", *own), reason
    for name, what in SHARED_BY_ESTIMATORS.items():
        readers = [one.name for one in ADV_ESTIMATORS.values() if name in (one.reads or ())]
        if name not in chosen.reads:
            yield (f"algorithm.{name}",), _only(readers, *what)
    for one in ADV_ESTIMATORS.values():
        if one is not chosen and one.settings is not None:
            reason = f"{ESTIMATOR_KIND.key} is not {one.name}"
            if one.reads_reward_parts:
                reason = f"only the estimator {one.name} reads the parts of the reward"
            yield ESTIMATOR_KIND.own_keys(one), reason


def _unread_by_loss(config: Any) -> Iterator[Unread]:
    """The same for the chosen policy loss."""
    chosen = POLICY_LOSSES.get(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    if chosen is None or chosen.reads is None:
        return
    unread = [name for name in SHARED_BY_LOSSES if name not in chosen.reads]
    if len(unread) == len(SHARED_BY_LOSSES):
        yield tuple(f"{_ACTOR}.{name}" for name in unread), "this policy loss clips nothing"
    for name in unread:
        reason = "this policy loss has no dual clip" if name == "clip_ratio_c" else "this policy loss does not read it"
        yield (f"{_ACTOR}.{name}",), reason
    for one in POLICY_LOSSES.values():
        if one is not chosen and one.settings is not None:
            yield LOSS_KIND.own_keys(one), f"{LOSS_KIND.key} is not {one.name}"


def _only(names: list[str], does: str, do: str, what: str) -> str:
    """Which algorithms read a setting: `only the estimators gae and reinforce_plus_plus discount`."""
    *first, last = names
    text = f"the estimators {', '.join(first)} and {last} {do}" if first else f"the estimator {last} {does}"
    return f"only {text} {what}".rstrip()


def idle_settings(config: Any, explicit: set[str]) -> Iterator[str]:
    """One sentence for each reason that holds, with the set keys that do nothing for it.

    A key is mentioned once, with the first reason. A value that is the default anyway is not mentioned.
    """
    table, unread = leaves(type(config)), list[Unread]()
    if hasattr(config, "algorithm"):
        unread = [*_unread_by_estimator(config), *_unread_by_loss(config)]
    keys_by_reason: dict[str, list[str]] = {}
    for key in sorted(explicit):
        if lookup(config, key) == table[key].default:
            continue
        reasons = [reason for keys, reason in unread if key in keys or key.startswith(_prefixes(keys))]
        reasons += [one.reason for one in table[key].idle if _holds(one, config)]
        if reasons:
            keys_by_reason.setdefault(reasons[0], []).append(key)
    for reason, keys in keys_by_reason.items():
        yield f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {reason}."


def _prefixes(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(key for key in keys if key.endswith("."))


def _holds(idle: Idle, config: Any) -> bool:
    if idle.condition is not None:
        return idle.condition(config)
    key, _, said = idle.reason.partition(",")[0].partition(" is ")
    value, is_not, said = lookup(config, key), said.startswith("not "), said.removeprefix("not ")
    if said == "set":
        return (value in (None, -1)) == is_not
    return (value == _VALUES.get(said, said)) != is_not
