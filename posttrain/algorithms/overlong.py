"""Overlong shaping: a penalty that grows linearly as a response nears the length limit.

    start   = limit - buffer
    penalty = 0                                                    up to `start` tokens
              -penalty_factor * (length - start) / buffer          beyond it, -penalty_factor at the limit

A response that is cut off at the limit is scored as wrong, however good it was up to there; the soft penalty tells it
before the cliff that it is getting long. It is added to the score of training responses; validation is not shaped.
`length` counts all tokens of the response, tool results included, as the limit does.

Source: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv 2503.14476.

When to use: long reasoning with many responses at the limit (response_length/clip_ratio).

Settings: reward.overlong_buffer.enable, reward.overlong_buffer.len (null: a fifth of data.max_response_length, as
DAPO's 4096 of 20480), reward.overlong_buffer.penalty_factor.

Watch: reward/overlong_reward/mean (0 when nothing is too long), response_length/clip_ratio (falls).

Signs of failure: responses that become short and wrong: a smaller buffer or factor, or a higher limit.
"""

from __future__ import annotations

from posttrain.lazy import torch


def overlong_penalty(length_B: torch.Tensor, limit: int, buffer: int, penalty_factor: float) -> torch.Tensor:
    """(B,) 0 or below: what is added to the score of responses of these lengths."""
    beyond_B = (length_B.to(torch.float64) - (limit - buffer)).clamp(min=0)
    return -penalty_factor * beyond_B / buffer
