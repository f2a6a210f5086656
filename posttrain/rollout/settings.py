"""The sampling settings of a run's responses, from its configuration."""

from __future__ import annotations

from typing import Any

from posttrain.config.root import PPOConfig
from posttrain.rollout.base import Sampling


def sampling_for(config: PPOConfig, *, validate: bool = False, end_ids: tuple[int, ...] = ()) -> Sampling:
    """How training's responses are sampled, or validation's; `end_ids` end a response."""
    rollout = config.actor_rollout_ref.rollout
    chosen: Any = rollout.val_kwargs if validate else rollout
    return Sampling(
        max_tokens=config.data.max_response_length,
        temperature=chosen.temperature,
        greedy=(validate and not rollout.val_kwargs.do_sample) or chosen.temperature == 0,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=0.0 if validate else rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        stop_token_ids=() if rollout.ignore_eos else end_ids,
        stop=tuple(rollout.stop),
    )


def sampling_words(config: PPOConfig, *, validate: bool = False) -> dict[str, Any]:
    """The same for people: without the ids that end a response."""
    sampling = vars(sampling_for(config, validate=validate))
    return {name: value for name, value in sampling.items() if name != "stop_token_ids"}
