"""Scores responses: by built-in scorers per data source or by your own function, in worker processes.

Nothing here imports torch or transformers, because every reward worker starts by importing this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.lazy import lazy_names

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

__getattr__ = lazy_names(
    __name__,
    answers="extract_final_answer",
    loading="resolve_reward",
    pool="RewardPool",
    scorers="SCORERS check_sources known_sources score_by_source",
    tryout="try_reward",
    types="RewardError RewardItem RewardResult RewardSpec",
)
