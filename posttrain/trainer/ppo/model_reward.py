"""A reward model's scores beside those of the reward functions: each recorded as a part, both summed with weights.

    reward = reward_model.weight x model + reward_model.function_weight x function

A function that nobody named (the built-in scorer of the rows' data source) has weight 0: it only tells whether
responses are right. A response that one of the counted two could not score gets `reward.failure_score`, and its error
says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.algorithms.reward_terms import OVERLONG, SCORE
from posttrain.batch.samples import last_rows
from posttrain.config.reward import RewardConfig, RewardModelConfig
from posttrain.protocol import DataProto
from posttrain.rewards.combined import RIGHT, read_parts
from posttrain.rewards.outcomes import TOO_LARGE, FailureWatch, is_usable
from posttrain.rewards.types import RewardPart
from posttrain.workers.groups import RewardModelGroup

MODEL, FUNCTION = "reward_model", "function"


class ModelReward:
    """Joins the scores. `functions` says whether rows have a function's score at all, `named` whether one was named."""

    def __init__(
        self,
        settings: RewardModelConfig,
        worker_group: RewardModelGroup,
        *,
        failure_score: float,
        functions: bool,
        named: bool,
    ) -> None:
        self.worker_group, self.functions = worker_group, functions
        self.failure_score, self.weight = failure_score, settings.weight
        # A built-in scorer that nobody asked for only records whether responses are right.
        chosen = settings.function_weight if settings.function_weight is not None else float(named)
        self.function_weight = chosen if functions else 0.0
        self._watch = FailureWatch("reward model", "reward_model.model.path")

    def words(self) -> str:
        """The reward as one sentence."""
        if not self.functions:
            return f"Reward: {self.weight:g} x reward model."
        if self.function_weight == 0:
            return f"Reward: {self.weight:g} x reward model; the function's score is recorded and does not count."
        return f"Reward: {self.weight:g} x reward model + {self.function_weight:g} x function."

    def join(self, batch: DataProto, *, validation: bool = False) -> None:
        """Adds the model's scores to `reward_score`, `reward_parts` and `reward_error`, which the functions gave.

        In validation a function's score stays the score where there is one: it tells what was learned, the model's
        score only how the model likes it.
        """
        # Of a sample of several rows the last one is scored: its conversation ended there.
        last, scored_B = np.unique(last_rows(batch), return_inverse=True)
        place: list[int] = scored_B.tolist()
        scored = self.worker_group.compute_rm_score(batch if len(last) == len(batch) else batch[last])
        self._watch.check(list(scored.non_tensor_batch["rm_error"]))
        scores_B = scored.batch["rm_scores"].sum(-1).tolist()
        fields, found = batch.non_tensor_batch, scored.non_tensor_batch
        for row in range(len(batch)):
            own = float(fields["reward_score"][row]), fields["reward_parts"][row], fields["reward_error"][row]
            score, parts, error = self._row(scores_B[place[row]], found["rm_error"][place[row]], *own)
            fields["reward_parts"][row], fields["reward_error"][row] = parts, error
            if not (validation and self.functions):
                fields["reward_score"][row] = score
        fields["rm_truncated"] = found["rm_truncated"][scored_B]

    def _row(
        self, model: float, model_error: str | None, function: float, parts: dict[str, Any], error: str | None
    ) -> tuple[float, dict[str, Any], str | None]:
        # A part with weight 0 may fail: it is only recorded.
        failed = model_error is not None or (error is not None and self.function_weight != 0)
        total = self.failure_score if failed else self.weight * model + self.function_weight * function
        parts = dict(parts)
        if model_error is None:
            parts[MODEL] = model
        if self.functions and error is None:
            parts[FUNCTION] = function
            parts.setdefault("acc", float(function >= RIGHT))
        texts = [f"{name}: {text}" for name, text in ((MODEL, model_error), (FUNCTION, error)) if text is not None]
        if not is_usable(total):
            texts.append(f"the weighted sum is {total:g}{TOO_LARGE}")
            total = self.failure_score
        return total, parts, "\n".join(texts) or None


def reward_weights(
    reward: RewardConfig, model_reward: ModelReward | None, parts: Sequence[RewardPart] = (), *, named: bool
) -> dict[str, float]:
    """Part -> weight (0: only recorded); empty where a function's own parts decide.

    parts: of function objects that are summed.
    named: whether the user named the function; the parts of a built-in scorer are findings, not rewards.
    """
    functions = {part.name: part.weight for part, _ in read_parts(reward.functions)}
    functions = functions or {part.name: part.weight for part in parts}
    weights = functions or ({} if named else {SCORE: 1.0})
    if model_reward is not None:
        factor = model_reward.function_weight
        inner = {name: factor * weight for name, weight in functions.items()} or {FUNCTION: factor}
        weights = {MODEL: model_reward.weight, **inner}
    buffer = reward.overlong_buffer
    return weights | ({OVERLONG: buffer.penalty_factor} if buffer.enable else {})
