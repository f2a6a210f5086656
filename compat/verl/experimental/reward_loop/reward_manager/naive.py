"""A response scored by `compute_score`, a function or a coroutine."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.registry import register
from verl.utils.reward_score import default_compute_score


@register("naive")
class NaiveRewardManager(RewardManagerBase):
    """The score is the function's number, or `score` of its dict; all of a dict is told beside it."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score or default_compute_score)
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)
        self.reward_router_address, self.reward_model_tokenizer = reward_router_address, reward_model_tokenizer

    async def run_single(self, data: Any) -> dict[str, Any]:
        row = data[len(data) - 1]  # of a conversation in several sequences the last one counts
        length = self._length(row)
        text = await asyncio.to_thread(
            self.tokenizer.decode, row.batch["responses"][:length].tolist(), skip_special_tokens=True
        )
        result = await self._score(row, text)
        told = dict(result) if isinstance(result, dict) else {"acc": result}
        score = result["score"] if isinstance(result, dict) else result
        return self._finished(score, told, length)

    def _length(self, row: Any) -> int:
        """Tokens of the response."""
        return int(row.batch["attention_mask"][-row.batch["responses"].shape[-1] :].sum())

    async def _score(self, row: Any, text: str) -> Any:
        fields = row.non_tensor_batch
        extra = dict(fields.get("extra_info") or {}) | dict(fields.get("tool_extra_fields") or {})
        extra["num_turns"] = fields.get("__num_turns__")
        extra["rollout_reward_scores"] = fields.get("reward_scores", {})
        given: dict[str, Any] = {
            "data_source": fields["data_source"],
            "solution_str": text,
            "ground_truth": fields["reward_model"]["ground_truth"],
            "extra_info": extra,
        }
        if self.reward_router_address is not None:
            given["reward_router_address"] = self.reward_router_address
            given["reward_model_tokenizer"] = self.reward_model_tokenizer
        if self.is_async_reward_score:
            return await self.compute_score(**given)
        return await asyncio.to_thread(self.compute_score, **given)

    def _finished(self, score: float, told: dict[str, Any], length: int) -> dict[str, Any]:
        return {"reward_score": score, "reward_extra_info": told}
