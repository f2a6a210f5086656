"""Settings of conversations, two untyped dicts of the rollout: `multi_turn` (tools) and `agent` (your own function)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain import cores
from posttrain.config.checked import Checked, Finding, check_dict, settings_of
from posttrain.registry import built_in_names
from posttrain.settings import ONE_OR_MORE, POSITIVE, at_least, setting

TURNS_KEY, AGENT_KEY = "actor_rollout_ref.rollout.multi_turn", "actor_rollout_ref.rollout.agent"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
SIDES = ("left", "middle", "right")
THINKING = ("keep", "strip")
_LIMITS = ("max_tool_seconds", "max_tool_cost")
_FORMATS = sorted(file.name for file in (Path(__file__).parent / "formats").glob("*.py"))
# Checking settings must not import torch, so the formats of tool calls are read from the source that registers them.
FORMATS = tuple(
    sorted(name for file in _FORMATS for name in built_in_names(f"conversations/formats/{file}", "FORMATS.add"))
)
EXTERNAL_PROGRAM = "outside"
"""The value of `agent.program` if programs are started outside of the run."""
STRIPS = "thinking_in_history"
VERIFIERS = "verifiers:"
"""The prefix of `agent.path` for an environment of the package verifiers."""
PROGRAM = "program"
"""The name of the agent that `agent.program` creates."""
BUILT_IN = ("single_turn_agent", "tool_agent")
"""Names of verl's own loops: they do what a run does without an agent, and with multi_turn."""


@dataclass(frozen=True)
class TurnSettings:
    """`tools` are names (`calculator`, `python`, `search`) or functions of your own (`FILE.py:NAME`)."""

    enable: bool = False
    """Answer the tool calls in a response, and let the model continue after the answer."""
    tools: list[str] = field(default_factory=list)
    """Tools that the model may call."""
    tool_config: dict[str, Any] = field(default_factory=dict)
    """Settings of tools by their names; each tool checks its own."""
    tool_config_path: str | None = None
    """A YAML file with tools of classes written for verl (`tools:` with `class_name`, `config`, `tool_schema`)."""
    function_tool_path: str | None = None
    """A Python file with functions that verl's `@function_tool` makes tools."""
    mcp_config_path: str | None = None
    """A JSON file of MCP servers (`mcpServers` with `command` and `args`, or `url`), all of whose tools are given."""
    max_assistant_turns: int | None = setting(None, range=ONE_OR_MORE)
    """Turns of the model in one response; null is as many as fit into data.max_response_length."""
    max_parallel_calls: int = setting(1, range=ONE_OR_MORE)
    """Calls that are answered in one turn; further calls get a refusal as their answer."""
    max_tool_response_length: int = setting(1024, range=ONE_OR_MORE)
    """Characters of a tool result that the model is shown; a mark shows where text was removed."""
    tool_response_truncate_side: str = setting("middle", choices=SIDES)
    """The part of a longer result that is kept: its beginning (`left`), both ends (`middle`) or its end (`right`)."""
    tool_timeout_s: float = setting(30.0, range=at_least(0.001))
    """Seconds that a call may take; a call that takes longer is answered with an error."""
    max_tool_seconds: float | None = setting(None, range=POSITIVE)
    """Seconds that the tools of one conversation may take in all (calls of one turn that run side by side count once);
    beyond it there is no further turn. null is no limit."""
    max_tool_cost: float | None = setting(None, range=POSITIVE)
    """The most that the calls of one conversation may cost, in the unit of the costs that its tools give (`cost` of an
    answer); beyond it there is no further turn. null is no limit."""
    format: str = setting("auto", choices=("auto", *FORMATS))
    """How the model writes calls; `auto` finds the format that reads what the chat template writes."""
    thinking_in_history: str = setting("keep", choices=THINKING)
    """Whether later turns see what the model thought in earlier ones (`keep`), or what the chat template leaves of it
    (`strip`); each context without it is a further row of the sample."""


@dataclass(frozen=True)
class AgentSettings:
    """`path` names the function (`FILE.py:NAME`); verl's keys are `default_agent_loop`, `agent_loop_config_path`."""

    path: str | None = None
    """The function or class that runs a conversation: `FILE.py:NAME`, `module.NAME`, or a registered name."""
    config: dict[str, Any] = field(default_factory=dict)
    """Its keyword-only arguments (those after `*`), by name."""
    timeout_s: float = setting(60.0, range=POSITIVE)
    """Seconds that it may take between two turns of the model; a conversation that takes longer fails."""
    processes: int = setting(32, range=ONE_OR_MORE)
    """Worker processes for agents on each machine; if there are more conversations, several share a process."""
    on_all_machines: bool = True
    """Run tools and agents of your own on every machine of the run's Ray that has cores; false keeps them on the
    driver's."""
    max_rows: int | None = setting(None, range=ONE_OR_MORE)
    """Most rows of one sample (sub-agents, compacted or changed histories). Beyond it, an agent gets an error and a
    program HTTP status 400. null is no limit."""
    default_agent_loop: str | None = None
    """A registered name, as in verl: the agent of rows without an `agent_name`."""
    agent_loop_config_path: str | None = None
    """A YAML file of verl's form: a list of `name` and `_target_`."""
    interaction_config_path: str | None = None
    """A YAML file of verl's interactions, which answer the model's turns like a user (`interaction:` with `name`,
    `class_name`, `config`); also `multi_turn.interaction_config_path`."""
    program: str | None = None
    """A command that runs each conversation in its own process, which calls the policy over HTTP (docs/serve.md);
    `outside` waits for programs that are started elsewhere."""
    program_per: str = setting("sample", choices=("sample", "run"))
    """Whether the program is started for each sample, or once for the `run`. In the second case it requests samples
    itself (docs/serve.md), so it starts only once."""
    python: str | None = None
    """The interpreter of a program that begins with `python`, or of verifiers; its packages may differ from the
    trainer's."""
    max_programs: int = setting(32, range=ONE_OR_MORE)
    """Programs that run at the same time; the others of a step wait."""
    memory_gb: float | None = setting(None, range=POSITIVE)
    """GiB of address space that each process of a program may have; null is no limit."""
    host: str = "127.0.0.1"
    """The address on which the programs' server listens."""
    port: int = setting(0, range=at_least(0))
    """Its port; 0 takes a free port."""
    http_processes: int | None = setting(None, range=ONE_OR_MORE)
    """Processes of that server, each with its own port (`port`, `port` + 1, ...). null is one for every four cores, at
    most 4; with `program: outside` it is one."""

    def count_http_processes(self) -> int:
        """How many processes serve HTTP requests of programs."""
        if self.http_processes is not None:
            return self.http_processes
        return 1 if self.program == EXTERNAL_PROGRAM else max(1, min(4, cores.usable() // 4))

    @property
    def uses_http(self) -> bool:
        """Whether conversations are driven over HTTP, by a program or an environment of verifiers."""
        return bool(self.program or (self.path or "").startswith(VERIFIERS))

    @property
    def default(self) -> str | None:
        """The agent of rows without an `agent_name`."""
        interacts = "tool_agent" if self.interaction_config_path else None
        return PROGRAM if self.uses_http else self.path or self.default_agent_loop or interacts

    @property
    def enable(self) -> bool:
        files = self.agent_loop_config_path or self.interaction_config_path
        return bool(files or (self.default and self.default not in BUILT_IN))


def turn_settings(given: Mapping[str, Any]) -> TurnSettings:
    """The settings of a checked dict."""
    return settings_of(TurnSettings, given)


def agent_settings(given: Mapping[str, Any]) -> AgentSettings:
    """The settings of a checked dict."""
    return settings_of(AgentSettings, given)


def check(checked: Checked) -> Iterator[Finding]:
    """Check names, types and ranges, that there is a tool to call, and that there is at most one agent."""
    if hasattr(checked.config, "actor_rollout_ref"):  # supervised training has no conversations
        yield from _check_turns(checked)
        yield from _check_agent(checked)


def _check_turns(checked: Checked) -> Iterator[Finding]:
    settings = yield from check_dict(checked, TURNS_KEY, TurnSettings)
    if settings is None:
        return
    # An environment has its own tools, and an interaction answers turns without tools.
    given = checked.config.actor_rollout_ref.rollout.agent
    agent = [name for name, one in given.items() if one is not None and name != "on_all_machines"]
    files = settings.tool_config_path or settings.function_tool_path or settings.mcp_config_path
    if settings.enable and not (settings.tools or files or agent):
        what = f"`{TURNS_KEY}.enable=True`, but there is no tool that the model could call."
        yield checked.problem(what, "name some: actor_rollout_ref.rollout.tools=[calculator]", TURNS_KEY)
    of_agents = ("max_assistant_turns", "thinking_in_history", *_LIMITS)
    always = ("enable", *(of_agents if agent else ()))
    without_effect = [name for name in checked.config.actor_rollout_ref.rollout.multi_turn if name not in always]
    if without_effect and not settings.enable:
        why = f"{TURNS_KEY}.enable is False, so that no tool is called"
        yield f"{TURNS_KEY}: {_idle(without_effect)}: {why}."
    limits = [name for name in checked.config.actor_rollout_ref.rollout.multi_turn if name in _LIMITS]
    if limits and (given.get("program") or str(given.get("path")).startswith(VERIFIERS)):
        yield f"{TURNS_KEY}: {_idle(limits)}: a program calls its own tools."


def _check_agent(checked: Checked) -> Iterator[Finding]:
    settings = yield from check_dict(checked, AGENT_KEY, AgentSettings)
    if settings is None:
        return
    if settings.path and settings.default_agent_loop not in (None, settings.path):
        other = settings.default_agent_loop
        what = f"`{AGENT_KEY}.path={settings.path}` and `{AGENT_KEY}.default_agent_loop={other}` are two agents."
        yield checked.problem(what, "keep one of them", AGENT_KEY)
    given = checked.config.actor_rollout_ref.rollout.agent
    other = settings.path or (PROGRAM if settings.program else settings.default_agent_loop)
    if settings.interaction_config_path and (settings.path or other in (PROGRAM, BUILT_IN[0])):
        what = f"`{AGENT_KEY}.interaction_config_path` has no effect on the agent {other}, which leads conversations."
        yield checked.problem(what, "keep one of them", AGENT_KEY)
    if settings.program and (settings.path or settings.default_agent_loop):
        what = f"`{AGENT_KEY}.program` and `{AGENT_KEY}={settings.path or settings.default_agent_loop}` are two agents."
        yield checked.problem(what, "keep one of them", AGENT_KEY)
    if settings.uses_http and settings.host not in _LOOPBACK and not os.environ.get("POSTTRAIN_API_KEY"):
        what = f"`{AGENT_KEY}.host={settings.host}` lets other machines in, and there is no key."
        yield checked.problem(what, "set the environment variable POSTTRAIN_API_KEY", f"{AGENT_KEY}.host")
    of_programs = [
        name for name in given if name in ("program_per", "python", "max_programs", "memory_gb", "host", "port")
    ]
    if of_programs and not settings.uses_http:
        yield f"{AGENT_KEY}: {_idle(of_programs)}: {AGENT_KEY}.program is not set."
    if settings.program == EXTERNAL_PROGRAM and "program_per" in given:
        yield f"{AGENT_KEY}.program_per has no effect: programs elsewhere are not started by the run."
    program_pulls_samples = settings.uses_http and (
        settings.program in (None, EXTERNAL_PROGRAM) or settings.program_per == "run"
    )
    if "max_programs" in given and program_pulls_samples:
        yield f"{AGENT_KEY}.max_programs has no effect: one program requests the samples itself."
    if settings.program and "config" in given:
        yield f"{AGENT_KEY}.config has no effect: a program has its arguments in {AGENT_KEY}.program."
    without_effect = [name for name in given if name in ("config", "timeout_s", "processes", "max_rows")]
    if "max_rows" in without_effect and checked.config.actor_rollout_ref.rollout.multi_turn.get(STRIPS) == "strip":
        without_effect.remove("max_rows")  # each context without its thinking is a row
    if "on_all_machines" in given and not checked.config.actor_rollout_ref.rollout.multi_turn.get("enable"):
        without_effect.append("on_all_machines")
    if without_effect and not settings.enable:
        yield f"{AGENT_KEY}: {_idle(without_effect)}: no agent is named ({AGENT_KEY}=FILE.py:NAME)."


def _idle(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect"
