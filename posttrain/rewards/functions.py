"""`reward.functions`: several rewards with names and weights, read from the settings and checked."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from posttrain.config.reward import CustomRewardConfig, RewardPartConfig
from posttrain.rewards.types import RewardError, RewardPart, RewardSpec

_LENGTH = ("min_tokens", "free_tokens", "max_tokens")
_SHAPES = ("tags", "pattern", *_LENGTH)
_TAKEN = ("acc", "pred", "answer", "score", "failures", "reward_model", "function")


def read_parts(functions: dict[str, Any]) -> Iterator[tuple[RewardPart, CustomRewardConfig | None]]:
    """Each part, and the function that it names if it is the user's own; RewardError with its place in the settings."""
    for name, entry in functions.items():
        try:
            yield _part(str(name), entry, [other for other in functions if other != name])
        except RewardError as error:
            error.where = error.where or f"reward.functions.{name}"
            raise


def _part(name: str, entry: Any, others: list[str]) -> tuple[RewardPart, CustomRewardConfig | None]:
    config = _config(entry)
    if name in _TAKEN or "/" in name:
        raise RewardError(f"a reward cannot be named {name!r}", todo="choose another name; it becomes reward/NAME/mean")
    if config.needs is not None and config.needs not in others:
        raise RewardError(
            f"needs={config.needs} names no other function of reward.functions",
            todo=f"use one of: {', '.join(others) or '(there is no other)'}",
        )
    kinds = [kind for kind in ("path", "data_source", "tags", "pattern") if config[kind]]
    kinds += ["length"] if any(config[key] is not None for key in _LENGTH) else []
    if len(kinds) > 1:
        raise RewardError(f"{' and '.join(kinds)} are given for one function", todo="make two functions of them")
    part = RewardPart(name, config.weight, config.needs, RewardSpec())
    if kinds == ["path"]:
        return part, CustomRewardConfig(path=config.path, name=config.name, reward_kwargs=config.reward_kwargs)
    if config.name or config.reward_kwargs:
        raise RewardError("name and reward_kwargs belong to a function of your own", todo="give its path")
    if kinds == ["data_source"]:
        part.spec = RewardSpec(path=str(config.data_source), label=f"built-in scorer {config.data_source}")
    elif kinds:
        settings = {key: config[key] for key in _SHAPES if config[key] is not None}
        part.spec = RewardSpec(kind="shape", kwargs=settings, label=", ".join(f"{k}={v}" for k, v in settings.items()))
    return part, None


def part_name(name: str, others: Sequence[str]) -> str:
    """The name under which a function object is recorded: its own, unless that is taken or none."""
    name = name if name.isidentifier() else "reward"
    name = f"{name}_reward" if name in _TAKEN else name
    number = next(n for n in itertools.count(1) if (name if n == 1 else f"{name}_{n}") not in others)
    return name if number == 1 else f"{name}_{number}"


def _config(entry: Any) -> RewardPartConfig:
    if isinstance(entry, int | float) and not isinstance(entry, bool):
        entry = {"weight": entry}
    if not isinstance(entry, dict):
        raise RewardError(
            f"{entry!r} describes no reward", todo="give a mapping (path, weight, ...), or a weight alone"
        )
    known = {field.name: field for field in fields(RewardPartConfig)}
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise RewardError(f"unknown key {key!r}", todo=f"{hint}known: {', '.join(known)}")
    config = RewardPartConfig(**entry)
    weight = config.weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise RewardError(f"weight={weight!r} is not a finite number", todo="give a number; below 0 is a penalty")
    for key in _LENGTH:
        value = config[key]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise RewardError(f"{key}={value!r} is not a count of tokens", todo="give a whole number, 0 or more")
    if config.tags is not None and not (isinstance(config.tags, list | tuple) and all(map(str, config.tags))):
        raise RewardError(f"tags={config.tags!r} is no list of names", todo="give [think,answer]")
    return config


def asks_sources(spec: RewardSpec) -> bool:
    """Whether rows are scored by the scorer of their own data source."""
    return (spec.kind == "builtin" and not spec.path) or any(asks_sources(part.spec) for part in spec.parts)


def named_sources(spec: RewardSpec) -> set[str]:
    """Built-in scorers that the settings name, whatever the rows' data sources."""
    own = {spec.path} if spec.kind == "builtin" and spec.path else set()
    return own.union(*(named_sources(part.spec) for part in spec.parts))
