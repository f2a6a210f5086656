"""Which weighted sum a run's reward is, by the names under which its parts are recorded."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.algorithms.reward_terms import OVERLONG, SCORE
from posttrain.config.root import PPOConfig
from posttrain.rewards.functions import read_parts
from posttrain.rewards.types import RewardPart
from posttrain.trainer.ppo.model_reward import FUNCTION, MODEL, ModelReward


def reward_weights(
    config: PPOConfig, model_reward: ModelReward | None, parts: Sequence[RewardPart] = (), *, named: bool
) -> dict[str, float]:
    """Part -> weight (0: only recorded); empty where a function's own parts decide.

    parts: of function objects that are summed.
    named: whether the user named the function; the parts of a built-in scorer are findings, not rewards.
    """
    functions = {part.name: part.weight for part, _ in read_parts(config.reward.functions)}
    functions = functions or {part.name: part.weight for part in parts}
    weights = functions or ({} if named else {SCORE: 1.0})
    if model_reward is not None:
        factor = model_reward.function_weight
        inner = {name: factor * weight for name, weight in functions.items()} or {FUNCTION: factor}
        weights = {MODEL: model_reward.weight, **inner}
    buffer = config.reward.overlong_buffer
    return weights | ({OVERLONG: buffer.penalty_factor} if buffer.enable else {})
