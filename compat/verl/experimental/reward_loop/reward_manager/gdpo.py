"""As `naive`; a dict needs `score`, and its other entries are the rewards that GDPO weighs."""

from __future__ import annotations

from typing import Any

from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.experimental.reward_loop.reward_manager.registry import register


@register("gdpo")
class GDPORewardManager(NaiveRewardManager):
    """Scores one response, and tells all rewards of it."""

    async def _score(self, row: Any, text: str) -> Any:
        result = await super()._score(row, text)
        if isinstance(result, dict) and "score" not in result:
            raise KeyError("GDPO reward functions returning a dict must include a scalar 'score' entry for rm_scores.")
        return result
