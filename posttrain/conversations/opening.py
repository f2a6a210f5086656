"""The conversation loop of a run, from its configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from posttrain.config.root import PPOConfig
from posttrain.config.trainer import continues_responses
from posttrain.conversations.adapters import as_program
from posttrain.conversations.agents import Agents, name_of
from posttrain.conversations.chat import Setup
from posttrain.conversations.conversation import Limits
from posttrain.conversations.format_proof import FALLBACK, choose_format, find_format
from posttrain.conversations.formats.base import FORMATS
from posttrain.conversations.loop import ConversationLoop
from posttrain.conversations.processes import AgentProcesses
from posttrain.conversations.runner import Runner
from posttrain.conversations.serving import require_aiohttp
from posttrain.conversations.serving.model import ServedModel
from posttrain.conversations.settings import AGENT_KEY as KEY
from posttrain.conversations.settings import BUILT_IN, AgentSettings, agent_settings, turn_settings
from posttrain.conversations.templates import MessageTemplate
from posttrain.conversations.thinking import EarlierThinking
from posttrain.conversations.tools.registry import make_tools_of
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.errors import UserError
from posttrain.rollout.base import Sampling
from posttrain.spelling import closest


@contextmanager
def open_conversations(
    config: PPOConfig, tokenizer: Any, device: torch.device, say: Callable[[str], None]
) -> Iterator[ConversationLoop | None]:
    """The loop with its tools and agents at work; None where responses have one turn."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    named, turns = agent_settings(rollout.agent), turn_settings(rollout.multi_turn)
    agents = as_program(named)
    if not (agents.enable or turns.enable):
        yield None
        return
    context: dict[str, Any] = {"config": config, "tokenizer": tokenizer, "say": say}
    by_row = Agents(agents, turns, context)
    tools = make_tools_of(turns) if turns.enable else {}
    for tool in tools.values():
        if note := getattr(tool, "note", None):
            say(f"note: {note}")
    template = MessageTemplate(tokenizer, data.apply_chat_template_kwargs)
    schemas = [tool.schema for tool in tools.values()]
    call_format = FALLBACK
    if shown := [*schemas, *by_row.tools]:
        call_format, note = choose_format(template, turns.format)
        template.check_tools(shown)
        if note:
            say(note)
        limit = f"up to {turns.max_assistant_turns}" if turns.max_assistant_turns else "any number of"
        say(f"Tools: {', '.join(one['function']['name'] for one in shown)}; a response has {limit} turns.")
    spent = turns.max_tool_seconds, turns.max_tool_cost
    limits = Limits(data.max_prompt_length, data.max_response_length, agents.max_rows, *spent)
    # Rounds wait for the slowest tool. Asynchronous runs do not: their event log makes them repeatable instead.
    continuous = continues_responses(config.trainer)
    in_rounds = (device.type == "cpu" or config.trainer.deterministic) and not continuous
    answers = {"max_chars": turns.max_tool_response_length, "side": turns.tool_response_truncate_side}
    thinking = EarlierThinking.of(template) if turns.thinking_in_history == "strip" else None
    if thinking is not None:
        thinking.check(only_tools=not agents.enable)
    with ExitStack() as opened:
        if agents.program:
            call_format = _open_programs(
                opened, context, agents, template, turns.format, limits, say, named.path, thinking
            )
        elif by_row.interactions and agents.default == "tool_agent":
            say(f"Interactions: {', '.join(by_row.interactions.names)}; they answer the model's turns.")
        elif agents.enable:
            say(f"Agent: {agents.default or 'by the rows (agent_name)'}; it leads each conversation.")
        turns = replace(turns, format=call_format)  # `auto` is known now
        setup, processes = Setup(template, limits, turns, schemas, thinking), None
        if agents.enable and not agents.program and hasattr(os, "fork"):
            # Forked before tools and agents have threads. Programs are processes anyway.
            processes = AgentProcesses(by_row, setup, timeout_s=agents.timeout_s, most=agents.processes)
        tool_runner = opened.enter_context(ToolRunner(tools, timeout_s=turns.tool_timeout_s, **answers))
        runner = opened.enter_context(Runner(tool_runner, agents.timeout_s, processes, context.get("programs")))
        yield ConversationLoop(by_row, runner, setup, in_rounds=in_rounds)
        programs = context.get("programs")
        for words in (*tool_runner.counts.troubles(), *(programs.troubles() if programs else ())):
            say(f"  ! {words}")


def _open_programs(
    opened: ExitStack,
    context: dict[str, Any],
    agents: AgentSettings,
    template: MessageTemplate,
    wanted: str,
    limits: Limits,
    say: Callable[[str], None],
    name: str | None,
    thinking: EarlierThinking | None,
) -> str:
    """Opens the server through which programs lead conversations; gives the format of their tool calls. `name` is that
    of an environment that the program plays."""
    require_aiohttp()
    from posttrain.conversations.programs import Programs

    call_format, no_tools = find_format(template, wanted, say)
    tokenizer, length = template.tokenizer, limits.prompt + limits.response
    model = ServedModel(
        "policy",
        template,
        FORMATS[call_format],
        Sampling(max_tokens=1),
        max_model_len=length,
        vocabulary=len(tokenizer),
        no_tools=no_tools,
        any_name=True,
        thinking=thinking,
    )
    context["programs"] = programs = opened.enter_context(Programs(agents, model, say))
    per = "one for the run" if agents.program_per == "run" else "one per conversation"
    say(f"Agent: the program `{name or agents.program}`, {per}, by its base URL at {programs.url}.")
    return call_format


def check_rows(loop: ConversationLoop | None, infos: Iterable[Any]) -> None:
    """Rows may name their agents (`agent_name` of their `extra_info`) and interactions: all of these must be known
    before the first step."""
    infos = list(infos)
    wanted = sorted({name for info in infos if (name := name_of({"extra_info": info}))})
    if loop is not None and loop.has_agents:
        known = [one["function"]["name"] for one in loop.agents.tools]
        for name in wanted:
            own = [one["function"]["name"] for one in loop.agents.agent(name).tools]
            if own != known and own:
                raise UserError(f"rows name the environment {name}, which has tools.\n  to do:  {KEY}={name}")
        if (interactions := loop.agents.interactions) is not None:
            for info in infos:
                if (name_of({"extra_info": info}) or loop.agents.settings.default) == "tool_agent":
                    interactions.name_of(info)
    elif strange := [name for name in wanted if name not in BUILT_IN]:
        near = closest(strange[0], BUILT_IN)
        hint = f" Did you mean {near}?" if near else ""
        raise UserError(
            f"rows name the agent {strange[0]} (column agent_name), but the run has no agents.{hint}\n"
            f"  to do:  {KEY}.default_agent_loop={strange[0]} and its file in actor_rollout_ref.model.external_lib, or "
            f"{KEY}.agent_loop_config_path=FILE.yaml, or {KEY}=FILE.py:NAME"
        )
