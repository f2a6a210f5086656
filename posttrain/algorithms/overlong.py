"""Overlong shaping: a penalty that grows linearly as a response nears the length limit.

    start   = limit - buffer
    penalty = 0                                                    up to `start` tokens
              -penalty_factor * (length - start) / buffer          beyond it, -penalty_factor at the limit

A response that is cut off at the limit is scored as wrong, however good it was so far. The soft penalty discourages
length before that point. It is added to the score of training responses; validation scores are unchanged. `length`
counts all tokens of the response, including tool results, as the limit does.

Source: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv 2503.14476.

When to use: long reasoning with many responses at the limit (response_length/clip_ratio).

Settings: reward.overlong_buffer.enable, reward.overlong_buffer.len (null: a fifth of data.max_response_length, as
DAPO's 4096 of 20480), reward.overlong_buffer.penalty_factor.

Watch: reward/overlong_reward/mean (0 if nothing is too long), response_length/clip_ratio (should fall).

Signs of failure: responses become short and wrong: use a smaller buffer or factor, or a higher limit.
"""

from __future__ import annotations

from posttrain.lazy import torch


def overlong_penalty(length_B: torch.Tensor, limit: int, buffer: int, penalty_factor: float) -> torch.Tensor:
    """Return (B,) numbers, 0 or negative, to add to the scores of responses of these lengths."""
    # Linear from the start of the buffer, so there is no step that a response could just avoid.
    beyond_B = (length_B.to(torch.float64) - (limit - buffer)).clamp(min=0)
    return -penalty_factor * beyond_B / buffer
