"""Ready-made rewards for the form of a response: tags in their order, a regular expression, a length in tokens.

tags:    1 if the response is `<think>...</think> <answer>...</answer>`, each once and nothing around them; the first
         opening tag may be missing, because chat templates often end in it.
pattern: 1 if the regular expression is found (`.` matches newlines too); `^...$` spans the whole response.
length:  1 from `min_tokens` to `free_tokens`; linear to 0 at `max_tokens` above, and at 0 tokens below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.rewards.outcomes import Outcome, ScoreItems, failure
from posttrain.rewards.signatures import Fields
from posttrain.rewards.types import RewardError

_BYTES_PER_TOKEN = 4  # used if a response comes without its tokens (`posttrain reward try`)


def shaping(settings: dict[str, Any]) -> ScoreItems:
    """Build the reward of a part's settings; RewardError if they are invalid."""
    if settings.get("tags"):
        score = tags_score(list(settings["tags"]))
    elif settings.get("pattern"):
        score = pattern_score(str(settings["pattern"]))
    else:
        score = length_score(settings.get("min_tokens") or 0, settings.get("free_tokens"), settings.get("max_tokens"))

    def outcomes(items: Sequence[Fields]) -> list[Outcome]:
        return [_outcome(score, item) for item in items]

    return outcomes


def _outcome(score: Callable[[Fields], float], item: Fields) -> Outcome:
    try:
        return score(item), {}, None
    except RecursionError as error:  # the regular expression is too deep for this response
        return failure(f"RecursionError: {error}")


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
