"""Who leads the conversations of a run, from its configuration: the loop over tools, agents, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.config.agent import BUILT_IN, KEY, agent_settings
from posttrain.config.closest import closest
from posttrain.config.root import PPOConfig
from posttrain.config.turns import turn_settings
from posttrain.errors import UserError
from posttrain.rollout.agents.composed import Limits
from posttrain.rollout.agents.loop import Agents
from posttrain.rollout.agents.registry import Leads
from posttrain.rollout.agents.runner import AgentRunner
from posttrain.rollout.tools.registry import make_tools
from posttrain.rollout.tools.runner import ToolRunner
from posttrain.rollout.turns.loop import Turns
from posttrain.rollout.turns.replies import check_shown
from posttrain.rollout.turns.rows import Loop
from posttrain.tracking.progress import say


@contextmanager
def opened_turns(
    config: PPOConfig, tokenizer: Any, device: torch.device, say: Callable[[str], None] = say
) -> Iterator[Loop | None]:
    """The loop over turns with its tools or agents at work; None where responses have one turn."""
    if agent_settings(config.actor_rollout_ref.rollout.agent).enable:
        with _opened_agents(config, tokenizer, device, say) as agents:
            yield agents
        return
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
            in_rounds=_in_rounds(config, device),
        )
        check_shown(tokenizer, turns.schemas, config.data.apply_chat_template_kwargs)
        limit = several.max_assistant_turns
        say(f"Tools: {', '.join(tools)}; a response has {f'up to {limit}' if limit else 'any number of'} turns.")
        yield turns
        for words in runner.counts.troubles():
            say(f"  ! {words}")


@contextmanager
def _opened_agents(
    config: PPOConfig, tokenizer: Any, device: torch.device, say: Callable[[str], None]
) -> Iterator[Agents]:
    settings = agent_settings(config.actor_rollout_ref.rollout.agent)
    leads = Leads(settings, {"config": config, "tokenizer": tokenizer})
    with AgentRunner(settings.timeout_s) as runner:
        say(f"Agent: {settings.default or 'by the rows (agent_name)'}; it leads each conversation.")
        yield Agents(
            leads,
            tokenizer,
            runner,
            limits=Limits(config.data.max_prompt_length, config.data.max_response_length),
            template_kwargs=config.data.apply_chat_template_kwargs,
            in_rounds=_in_rounds(config, device),
        )


def _in_rounds(config: PPOConfig, device: torch.device) -> bool:
    return device.type == "cpu" or config.trainer.deterministic


def check_agent_names(turns: Loop | None, names: Iterable[Any]) -> None:
    """Rows may name who leads their conversations (`agent_name`): all of these must be there before the first step."""
    wanted = sorted({str(name) for name in names if name})
    if isinstance(turns, Agents):
        for name in wanted:
            turns.leads.lead(name)  # pyright: ignore
    elif strange := [name for name in wanted if name not in BUILT_IN]:
        near = closest(strange[0], BUILT_IN)
        hint = f" Did you mean {near}?" if near else ""
        raise UserError(
            f"rows name the agent {strange[0]} (column agent_name), but the run has no agents.{hint}\n"
            f"  to do:  {KEY}.default_agent_loop={strange[0]} and its file in actor_rollout_ref.model.external_lib, or "
            f"{KEY}.agent_loop_config_path=FILE.yaml, or {KEY}=FILE.py:NAME"
        )
