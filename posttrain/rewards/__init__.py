"""Scores responses: by built-in scorers per data source or by your own function, in worker processes.

Nothing here imports torch or transformers, because every reward worker starts by importing this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.rewards.answers import extract_final_answer
    from posttrain.rewards.loading import resolve_reward
    from posttrain.rewards.pool import RewardPool
    from posttrain.rewards.scorers import SCORERS, check_sources, known_sources, score_by_source
    from posttrain.rewards.tryout import try_reward
    from posttrain.rewards.types import RewardError, RewardItem, RewardResult, RewardSpec

__all__ = [
    "SCORERS",
    "RewardError",
    "RewardItem",
    "RewardPool",
    "RewardResult",
    "RewardSpec",
    "check_sources",
    "extract_final_answer",
    "known_sources",
    "resolve_reward",
    "score_by_source",
    "try_reward",
]

_HOME = {
    "SCORERS": "scorers",
    "RewardError": "types",
    "RewardItem": "types",
    "RewardPool": "pool",
    "RewardResult": "types",
    "RewardSpec": "types",
    "check_sources": "scorers",
    "extract_final_answer": "answers",
    "known_sources": "scorers",
    "resolve_reward": "loading",
    "score_by_source": "scorers",
    "try_reward": "tryout",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
