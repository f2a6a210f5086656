"""Sections `custom_reward_function` and `reward`: who scores a response, and with which limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.config.sandbox import SandboxConfig
from posttrain.config.schema import Section
from posttrain.settings import ONE_OR_MORE, PROCESSES, SECONDS, Range, setting

LARGEST_SCORE = 1e18
"""Scores beyond it, on either side, count as failed: training squares them, and float32 ends at 3e38."""
SCORE = Range(lambda value: abs(value) <= LARGEST_SCORE, f"between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}")
FACTOR = Range(lambda value: 0 < value <= LARGEST_SCORE, f"above 0 and at most {LARGEST_SCORE:g}")


@dataclass
class CustomRewardConfig(Section):
    """Your own reward. Example: `custom_reward_function.path=my_reward.py`."""

    path: str | None = None
    """A Python file, a dotted path to a module or function, or a URL; null scores by `data_source`."""
    name: str | None = None
    """Function in that file; null takes `compute_score`, or the only public function."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function."""


@dataclass
class OverlongBufferConfig(Section):
    """A penalty on training responses that come near the length limit (DAPO)."""

    enable: bool = False
    """Take the penalty from the score."""
    len: int | None = setting(None, range=ONE_OR_MORE)
    """Tokens before the limit over which the penalty grows; null takes a fifth of `data.max_response_length`."""
    penalty_factor: float = setting(1.0, range=FACTOR)
    """Penalty of a response at the limit."""


@dataclass
class RewardPartConfig(Section):
    """One of several rewards. Example: `+reward.functions.form.tags=[think,answer] +reward.functions.form.weight=0.2`.

    It has at most one of path, data_source, tags, pattern and the lengths; with none of them rows are scored by
    their `data_source`.
    """

    weight: float = 1.0
    """What the score is multiplied by; below 0 it is a penalty."""
    needs: str | None = None
    """Another function: this one counts only where that one found the response right."""
    path: str | None = None
    """As in `custom_reward_function`: a file, a dotted path or a URL."""
    name: str | None = None
    """Function in that file."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function."""
    data_source: str | None = None
    """A built-in scorer for all rows, whatever their own source."""
    tags: list[str] | None = None
    """1 if the response consists of these tags, in their order."""
    pattern: str | None = None
    """1 if this regular expression is found in the response."""
    min_tokens: int | None = None
    """Responses shorter than this score less than 1."""
    free_tokens: int | None = None
    """Responses longer than this score less than 1."""
    max_tokens: int | None = None
    """Responses of this length or longer score 0."""


@dataclass
class RewardConfig(Section):
    """Several rewards, and limits on scoring, which runs in worker processes."""

    functions: dict[str, Any] = field(default_factory=dict)
    """Several rewards by name, summed with their weights; empty takes `custom_reward_function`, or the data source."""
    num_workers: int | None = setting(None, range=PROCESSES)
    """Worker processes; null takes one per core, at most 8."""
    timeout_s: float = setting(10.0, range=SECONDS)
    """Seconds that the scoring of one response (or one group) may take."""
    failure_score: float = setting(0.0, range=SCORE)
    """Score of a response whose reward raised, hung or was not a finite number."""
    code_partial_credit: bool = False
    """Give a program the share of tests that it passes, instead of 1.0 for all of them and 0.0 otherwise."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
