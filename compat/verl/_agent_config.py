"""posttrain's settings as agent loops of verl read them."""

from __future__ import annotations

from typing import Any


def verl_config(config: Any) -> Any:
    """The whole tree by attributes, with verl's names of lengths beside posttrain's."""
    from omegaconf import OmegaConf

    tree = config.to_dict()
    lengths = {"prompt_length": config.data.max_prompt_length, "response_length": config.data.max_response_length}
    rollout = tree["actor_rollout_ref"]["rollout"]
    rollout |= lengths
    turns = {"max_assistant_turns": None, "max_user_turns": None, "max_parallel_calls": 1, "tool_config_path": None}
    turns |= {"max_tool_response_length": 1024, "tool_response_truncate_side": "middle", "format": "hermes"}
    turns |= {"function_tool_path": None, "interaction_config_path": rollout["agent"].get("interaction_config_path")}
    rollout["multi_turn"] = {**turns, **(rollout.get("multi_turn") or {})}
    return OmegaConf.create(tree)
