"""Scores by data source with verl's rules. Importing this loads no torch, so reward workers start at once."""

from __future__ import annotations

import importlib
from typing import Any

from posttrain.utils.reward_score import gsm8k_reward
from verl._missing import not_given

__all__ = ["default_compute_score", "get_default_compute_score", "gsm8k_reward"]

_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
_SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_SCORERS = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math_reward"),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), "math_dapo"),
    **{f"numina_{name}": "prime_math" for name in _NUMINA},
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "prime_code"),
    "hiyouga/geometry3k": "geo3k",
    **{f"searchR1_{name}": "search_r1_like_qa_em" for name in _SEARCH},
}
"""Data source -> the module here that scores it."""


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict[str, Any]:
    """The score of a response by verl's rule for its data source; posttrain's scorer where verl has none.

    Programs run in posttrain's own sandbox: `sandbox_fusion_url` and what belongs to it is not needed.
    """
    name = "math_dapo" if data_source.startswith("aime") else _SCORERS.get(data_source)
    if name is None:
        return _by_posttrain(data_source, solution_str, ground_truth, extra_info)
    scorer = importlib.import_module(f"{__name__}.{name}")
    further = {"continuous": True} if name == "prime_code" else {}
    result = scorer.compute_score(solution_str, ground_truth, **further)
    if isinstance(result, dict):
        return result
    return float(result[0] if isinstance(result, tuple) else result)


def _by_posttrain(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float | dict[str, Any]:
    from posttrain.rewards.scorers import score_by_source
    from posttrain.rewards.types import RewardError

    try:
        return score_by_source(data_source, solution_str, ground_truth, extra_info)
    except RewardError as error:
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}: {error.todo}") from None


_default_compute_score = default_compute_score


def get_default_compute_score(reward_name: str | None = None) -> Any:
    """The default score of every reward manager."""
    return default_compute_score


def __getattr__(name: str) -> Any:
    if name in _SCORERS.values() or name in ("math_verify", "math_batch"):
        return importlib.import_module(f"{__name__}.{name}")
    return not_given(__name__)(name)
