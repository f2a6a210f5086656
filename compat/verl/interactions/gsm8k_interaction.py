"""verl's example: tells the model whether its answer to a grade-school problem is right."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.utils.reward_score import gsm8k

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Ends with the first right answer, which scores 1."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        said = [one["content"] for one in messages if one.get("role") == "assistant"]
        self._instance_dict[instance_id]["response"] = said[-1] if said else ""
        reward = await self.calculate_score(instance_id)
        return reward == 1.0, RIGHT if reward == 1.0 else WRONG, reward, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        own = self._instance_dict[instance_id]
        return gsm8k.compute_score(own["response"], own["ground_truth"], method="flexible", format_score=0.0, score=1.0)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._instance_dict.pop(instance_id, None)
