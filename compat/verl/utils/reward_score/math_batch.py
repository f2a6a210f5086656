"""MATH for a whole batch, as the batched reward manager calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.utils.reward_score.math_reward import compute_score


def compute_score_batched(data_sources: Any, solution_strs: Sequence[str], ground_truths: Any, extra_infos: Any) -> Any:
    """One score per response."""
    return [compute_score(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]
