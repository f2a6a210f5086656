"""Sections `custom_reward_function` and `reward`: who scores a response, and with which limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.config.base import Section
from posttrain.config.sandbox import SandboxConfig


@dataclass
class CustomRewardConfig(Section):
    """Your own reward. Example: `custom_reward_function.path=my_reward.py`."""

    path: str | None = None
    """A Python file, or a dotted path to a module or function; null scores by `data_source`."""
    name: str | None = None
    """Function in that file; null takes `compute_score`, or the only public function."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function."""


@dataclass
class OverlongBufferConfig(Section):
    """A penalty on training responses that come near the length limit (DAPO)."""

    enable: bool = False
    """Take the penalty from the score."""
    len: int | None = None
    """Tokens before the limit over which the penalty grows; null takes a fifth of `data.max_response_length`."""
    penalty_factor: float = 1.0
    """Penalty of a response at the limit."""


@dataclass
class RewardConfig(Section):
    """Limits on scoring, which runs in worker processes."""

    num_workers: int | None = None
    """Worker processes; null takes one per core, at most 8."""
    timeout_s: float = 10.0
    """Seconds that the scoring of one response (or one group) may take."""
    failure_score: float = 0.0
    """Score of a response whose reward raised, hung or was not a finite number."""
    code_partial_credit: bool = False
    """Give a program the share of tests that it passes, instead of 1.0 for all of them and 0.0 otherwise."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
