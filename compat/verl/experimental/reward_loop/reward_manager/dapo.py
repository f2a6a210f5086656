"""As `naive`, less DAPO's penalty for responses that come near `max_resp_len`."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.algorithms import overlong_penalty
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.experimental.reward_loop.reward_manager.registry import register


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """`reward.reward_kwargs` of the settings holds `max_resp_len` and `overlong_buffer_cfg`."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, tokenizer, compute_score, *args, **kwargs)
        given = config.reward.get("reward_kwargs", {})
        self.overlong_buffer_cfg, self.max_resp_len = given.get("overlong_buffer_cfg"), given.get("max_resp_len")
        buffer = self.overlong_buffer_cfg
        if buffer is not None and buffer.enable:
            assert self.max_resp_len is not None, "max_resp_len must be provided with overlong_buffer_cfg"
            assert 0 < buffer.len <= self.max_resp_len, "overlong_buffer_cfg.len must be from 1 to max_resp_len"

    def _finished(self, score: float, told: dict[str, Any], length: int) -> dict[str, Any]:
        buffer = self.overlong_buffer_cfg
        if buffer is not None and buffer.enable:
            taken = float(
                overlong_penalty(torch.tensor([length]), self.max_resp_len, buffer.len, buffer.penalty_factor)
            )
            score += taken
            if buffer.get("log", False):
                told |= {"overlong_reward": taken, "overlong": taken < 0}
        return super()._finished(score, told, length)
