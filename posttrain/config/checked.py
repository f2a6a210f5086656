"""How packages plug into config, which does not know them; and what checks of meaning work on: a typed configuration.

Other systems' settings: the package that `posttrain.lazy.dialect_package` names answers "do you know this key, and what
does it mean here?". It is imported when a run's settings are first loaded; without one, those keys are unknown keys.

Engines, models and tools: a module that `posttrain.lazy.check_modules` names takes part by functions of its own, loaded
without torch:

    def check(checked: Checked) -> Iterator[Finding]: ...                               # settings
    def check_environment(resolved: Resolved, folder: Path) -> Iterator[Problem]: ...   # this machine

`idle_settings` finds settings that the user set and that have no effect in this run; they are printed as notes. Fields
declare why they may have none (`setting(idle=...)`); what an algorithm reads, its own file declares.
"""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from posttrain import lazy
from posttrain.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES, Declaration, critic_estimators
from posttrain.config.resolved import Problem
from posttrain.config.schema import ESTIMATOR_KIND, LOSS_KIND, Kind, Leaf, leaves, lookup
from posttrain.config.values import WrongValue, convert
from posttrain.settings import Idle, choices_of, range_of
from posttrain.spelling import suggest

# A problem, or a note.
Finding = Problem | str
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Dialect:
    """What other systems call the settings of one program."""

    # Prefix there -> prefix here.
    moved: Mapping[str, str] = field(default_factory=dict)
    # Key there -> key here.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # The package's own object for a key that is no setting here; None for an unknown key.
    answer: Callable[[str], Any] = lambda key: None
    # Called with the `Merged` once all values are in it: act on the answered keys and on other words for values.
    apply: Callable[[Any], object] = lambda merged: None
    # All keys that it knows, to find what a misspelt one means.
    keys: Callable[[], Iterable[str]] = tuple
    # A sentence about a name that is only explained, not translated.
    advice: Callable[[str], str | None] = lambda name: None
    # Called with the `CommandLine` and the working folder: replace a main file that only the other system has; returns
    # (setting, source) of what that file would set.
    main_file: Callable[[Any, Path], list[tuple[str, str]]] = lambda line, folder: []


@cache
def dialect(program: str) -> Dialect:
    """The dialect of a program: `ppo_trainer`, `sft_trainer` or `reward_model_trainer`."""
    package = lazy.dialect_package
    return Dialect() if package is None else importlib.import_module(package).dialect(program)


@dataclass
class Checked:
    """A typed configuration under examination."""

    config: Any
    # Canonical keys that the user set.
    explicit: set[str]
    # Key -> where it was set.
    where: Callable[[str], str]

    def problem(self, what: str, do: str, *keys: str) -> Problem:
        return Problem(what, ", and ".join(dict.fromkeys(self.where(key) for key in keys)), do, keys)


def checks_of_packages(name: str) -> Iterator[Callable[..., Iterator[Any]]]:
    """The functions of this name in the modules that take part."""
    for module in map(importlib.import_module, lazy.check_modules):
        if hasattr(module, name):
            yield getattr(module, name)


def nearest_name(value: Any, known: tuple[str, ...]) -> str:
    """Advice for a name that is not known."""
    return suggest(str(value), known).rstrip() or "choose one of them"


def check_choice(
    checked: Checked, key: str, known: tuple[str, ...], elsewhere: Mapping[tuple[str, str], str], own: str = ""
) -> Iterator[Finding]:
    """A name that is not known; `elsewhere` answers (key, name) that other systems have, `own` says how users add one
    of their own."""
    value = lookup(checked.config, key)
    if value is None or value in known:
        return
    if (key, value) in elsewhere:
        yield checked.problem(f"`{key}={value}` cannot be used.", elsewhere[key, value], key)
    else:
        what = f"`{key}={value}` is not known; known: {', '.join(known)}."
        yield checked.problem(what, nearest_name(value, known) + own, key)


# -- free dicts that their owners check against a dataclass -----------------------------------------------------------
def settings_of(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """The settings of a checked dict."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: convert(value, hints[name]) for name, value in given.items()})


def check_dict(
    checked: Checked, key: str, kind: type[Settings], advice: str = "give a larger number, or leave it out"
) -> Generator[Finding, None, Settings | None]:
    """Findings about the entries of a dict; returns its settings, or None if there are any. `advice` is for numbers
    out of range."""
    given, is_right = lookup(checked.config, key), True
    for name, value in given.items():
        for what, do in _faults(key, name, value, kind, advice):
            is_right = False
            yield checked.problem(what, do, key)
    return settings_of(kind, given) if is_right else None


def _faults(key: str, name: str, value: Any, kind: type, advice: str) -> Iterator[tuple[str, str]]:
    """(what is wrong, what to do)."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if name not in fields:
        yield f"`{key}.{name}` is not known; known: {', '.join(fields)}.", nearest_name(name, tuple(fields))
        return
    try:
        typed = convert(value, typing.get_type_hints(kind)[name])
    except WrongValue as error:
        yield f"`{key}.{name}`: {error}.", f"give {key}.{name} such a value"
        return
    known, limits = choices_of(fields[name]), range_of(fields[name])
    if typed is not None and known and typed not in known:
        yield f"`{key}.{name}={typed}` is not known; known: {', '.join(known)}.", nearest_name(typed, known)
    if typed is not None and limits is not None and not limits.allows(typed):
        yield f"`{key}.{name}={typed}` must be {limits.words}.", advice


_ACTOR = "actor_rollout_ref.actor"
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
            yield _others(ESTIMATOR_KIND, one, chosen), reason


def _unread_by_loss(config: Any) -> Iterator[Unread]:
    """The same for the chosen policy loss."""
    chosen = POLICY_LOSSES.get(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    if chosen is None or chosen.reads is None:
        return
    unread = [name for name in SHARED_BY_LOSSES if name not in chosen.reads]
    if len(unread) == len(SHARED_BY_LOSSES):
        yield tuple(f"{_ACTOR}.{name}" for name in unread), f"the policy loss {chosen.name} reads no clip ratio"
    for name in unread:
        reason = "this policy loss has no dual clip" if name == "clip_ratio_c" else "this policy loss does not read it"
        yield (f"{_ACTOR}.{name}",), reason
    for one in POLICY_LOSSES.values():
        if one is not chosen and one.settings is not None:
            yield _others(LOSS_KIND, one, chosen), f"{LOSS_KIND.key} is not {one.name}"


def _others(kind: Kind, declaration: Declaration, chosen: Declaration) -> tuple[str, ...]:
    """An algorithm's own settings that the chosen one does not share."""
    return tuple(key for key in kind.own_keys(declaration) if key not in kind.own_keys(chosen))


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
        reasons = [
            reason
            for keys, reason in unread
            if any(key == one or (one[-1] == "." and key.startswith(one)) for one in keys)
        ]
        reasons += [one.reason for one in table[key].idle if holds(one, config)]
        if reasons:
            keys_by_reason.setdefault(reasons[0], []).append(key)
    for reason, keys in keys_by_reason.items():
        yield f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {reason}."


def holds(idle: Idle, config: Any) -> bool:
    """Whether a setting with this reason has no effect in a run of this configuration."""
    if idle.condition is not None:
        return idle.condition(config)
    key, _, said = idle.reason.partition(",")[0].partition(" is ")
    if key not in leaves(type(config)):
        near = suggest(key, leaves(type(config)))
        raise ValueError(f"idle={idle.reason!r}: {near}there is no setting {key}")
    value, is_not, said = lookup(config, key), said.startswith("not "), said.removeprefix("not ")
    if said == "set":
        return (value in (None, -1)) == is_not
    return (value == _value_of(leaves(type(config))[key], said, idle)) != is_not


def _value_of(leaf: Leaf, said: str, idle: Idle) -> Any:
    """The value that a condition names, as the setting's type; one that it cannot have is a mistake of its author."""
    try:
        value = convert(said, leaf.hint)
        is_possible = value is None or leaf.range is None or leaf.range.allows(value)
    except WrongValue:
        value, is_possible = said, False
    if not is_possible or (leaf.choices and value not in (None, *leaf.choices)):
        raise ValueError(f"idle={idle.reason!r}: {leaf.key} is never {said}; KEY is VALUE names a value it can have")
    return value
