"""Several rewards as one: the sum of weight x score over the functions of `reward.functions`, each recorded by name.

`acc` and `pred` come from the first function that judges answers; other parts of a function are recorded as
`<name>_<part>`. A function with `needs` counts only if the named one judged the response right. A function that does
not apply to a response (TRL's None) is not part of its sum. If one function fails, the response has no score, and the
error names the function.

`shaping` scores the form of a response:

tags:    1 if the response is `<think>...</think> <answer>...</answer>`, each once and nothing around them; the first
         opening tag may be missing, because chat templates often end in it.
pattern: 1 if the regular expression is found (`.` matches newlines too); `^...$` spans the whole response.
length:  1 from `min_tokens` to `free_tokens`; linear to 0 at `max_tokens` above, and at 0 tokens below.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from posttrain.config.rollout import CustomRewardConfig, RewardPartConfig
from posttrain.rewards.types import (
    NONE_APPLIES,
    TOO_LARGE,
    Fields,
    Outcome,
    RewardError,
    RewardPart,
    RewardSpec,
    ScoreItems,
    failure,
    is_usable,
)

_LENGTH = ("min_tokens", "free_tokens", "max_tokens")
_SHAPES = ("tags", "pattern", *_LENGTH)
_TAKEN = ("acc", "pred", "answer", "score", "failures", "reward_model", "function")


def read_parts(functions: dict[str, Any]) -> Iterator[tuple[RewardPart, CustomRewardConfig | None]]:
    """Yield each part, with the settings of its function if it is the user's own. A RewardError names the setting."""
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
    """Return the name under which a function object is recorded: its own, made unique."""
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
    """Return the built-in scorers that the settings name, whatever the rows' data sources."""
    own = {spec.path} if spec.kind == "builtin" and spec.path else set()
    return own.union(*(named_sources(part.spec) for part in spec.parts))


_OWN = ("acc", "pred", "answer")
# A response with this score (or this `acc`) counts as right.
RIGHT = 0.5


class Combined:
    """Scores one response, or a group, with all functions."""

    def __init__(self, parts: Sequence[tuple[RewardPart, ScoreItems]]) -> None:
        self.parts = parts
        self.judge = next((part.name for part, _ in parts if part.spec.kind != "shape"), None)

    def __call__(self, items: Sequence[Fields]) -> list[Outcome]:
        columns = {part.name: score(items) for part, score in self.parts}
        return [self._row({name: column[row] for name, column in columns.items()}) for row in range(len(items))]

    def _row(self, outcomes: dict[str, Outcome]) -> Outcome:
        total, parts, errors, applied = 0.0, {}, [], 0
        for part, _ in self.parts:
            score, own, error = outcomes[part.name]
            if error is not None:
                errors.append(f"{part.name}: {error}")
                continue
            if not math.isnan(score):
                if part.needs and not _is_right(outcomes[part.needs]):
                    score = 0.0
                total += part.weight * score
                parts[part.name] = score
                applied += 1
            for name, value in own.items():
                key = name if name in _OWN else f"{part.name}_{name}"
                parts.setdefault(key, value)
        if self.judge is not None and outcomes[self.judge][2] is None and not math.isnan(outcomes[self.judge][0]):
            parts.setdefault("acc", float(_is_right(outcomes[self.judge])))
        if not errors and not applied:
            errors.append(NONE_APPLIES)
        if not errors and not is_usable(total):
            errors.append(f"the weighted sum is {total:g}{TOO_LARGE}")
        return total, parts, "\n".join(errors) or None


def _is_right(outcome: Outcome) -> bool:
    score, parts, error = outcome
    acc = parts.get("acc", score)
    return error is None and not isinstance(acc, str) and acc >= RIGHT


_BYTES_PER_TOKEN = 4  # used if a response comes without its tokens (`posttrain reward try`)


def shaping(settings: dict[str, Any]) -> ScoreItems:
    """Build the reward of a part's settings; RewardError if they are invalid."""
    if settings.get("tags"):
        score = tags_score(list(settings["tags"]))
    elif settings.get("pattern"):
        score = pattern_score(str(settings["pattern"]))
    else:
        score = length_score(settings.get("min_tokens") or 0, settings.get("free_tokens"), settings.get("max_tokens"))

    def outcome(item: Fields) -> Outcome:
        try:
            return score(item), {}, None
        except RecursionError as error:  # the regular expression is too deep for this response
            return failure(f"RecursionError: {error}")

    return lambda items: [outcome(item) for item in items]


def tags_score(tags: Sequence[str]) -> Callable[[Fields], float]:
    names = [re.escape(tag) for tag in tags]
    first = rf"(?:<{names[0]}>)?(?P<t0>.*?)</{names[0]}>"
    rest = [rf"<{name}>(?P<t{i}>.*?)</{name}>" for i, name in enumerate(names[1:], 1)]
    whole = re.compile(r"\s*" + r"\s*".join([first, *rest]) + r"\s*", re.DOTALL)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]

    def score(item: Fields) -> float:
        text = item[1]
        if any(text.count(mark) > 1 for mark in marks):
            return 0.0
        return float(whole.fullmatch(text) is not None)

    return score


def pattern_score(pattern: str) -> Callable[[Fields], float]:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(
            f"the pattern {pattern!r} is no regular expression: {error}", todo="correct it; quote it in the shell"
        ) from None
    return lambda item: float(compiled.search(item[1]) is not None)


def length_score(least: int, free: int | None, most: int | None) -> Callable[[Fields], float]:
    """Score 1.0 within the free range, less beyond it, and 0.0 at the maximum."""
    free = max(least, free or 0) if most is not None else free
    if most is not None and free is not None and most <= free:
        raise RewardError(
            f"max_tokens={most} does not lie above free_tokens={free}", todo="let the reward fall over some tokens"
        )

    def score(item: Fields) -> float:
        tokens = item[4] if item[4] is not None else -(-len(item[1].encode(errors="replace")) // _BYTES_PER_TOKEN)
        if tokens < least:
            return tokens / least
        if most is None or free is None or tokens <= free:
            return 1.0
        return max(0.0, (most - tokens) / (most - free))

    return score
