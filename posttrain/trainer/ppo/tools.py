"""The tools of a run and the loop over its turns, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.config.root import PPOConfig
from posttrain.config.turns import turn_settings
from posttrain.rollout.tools.registry import make_tools
from posttrain.rollout.tools.runner import ToolRunner
from posttrain.rollout.turns.loop import Turns
from posttrain.rollout.turns.replies import check_shown
from posttrain.tracking.progress import say


@contextmanager
def opened_turns(
    config: PPOConfig, tokenizer: Any, device: torch.device, say: Callable[[str], None] = say
) -> Iterator[Turns | None]:
    """The loop over turns with its tools at work; None where responses have one turn."""
    several = turn_settings(config.actor_rollout_ref.rollout.multi_turn)
    if not several.enable:
        yield None
        return
    tools = make_tools(several.tools, several.tool_config, config_path=several.tool_config_path)
    for tool in tools.values():
        if note := getattr(tool, "note", None):
            say(f"note: {note}")
    limits = {"max_chars": several.max_tool_response_length, "side": several.tool_response_truncate_side}
    with ToolRunner(tools, timeout_s=several.tool_timeout_s, **limits) as runner:
        turns = Turns(
            several,
            tokenizer,
            runner,
            max_response_length=config.data.max_response_length,
            template_kwargs=config.data.apply_chat_template_kwargs,
            in_rounds=device.type == "cpu" or config.trainer.deterministic,
        )
        check_shown(tokenizer, turns.schemas, config.data.apply_chat_template_kwargs)
        limit = several.max_assistant_turns
        say(f"Tools: {', '.join(tools)}; a response has {f'up to {limit}' if limit else 'any number of'} turns.")
        yield turns
        for words in runner.counts.troubles():
            say(f"  ! {words}")
