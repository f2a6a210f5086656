"""`actor_rollout_ref.rollout.agent`: conversations that a function of your own leads.

The loop over agents owns these settings as one free dict, and checks them here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.config.checked import Checked, Finding
from posttrain.config.free_dict import Fault, settings_of, typed_entry

KEY = "actor_rollout_ref.rollout.agent"
BUILT_IN = ("single_turn_agent", "tool_agent")
"""Names of verl's own loops: what a run does without an agent, and what it does with multi_turn."""


@dataclass(frozen=True)
class AgentSettings:
    """`path` names the function (`FILE.py:NAME`); the other two are verl's ways to do so."""

    path: str | None = None
    """The function or class that leads a conversation: `FILE.py:NAME`, `module.NAME`, or a registered name."""
    config: dict[str, Any] = field(default_factory=dict)
    """What it takes behind its `*`, by name."""
    timeout_s: float = 60.0
    """Seconds that it may take between two turns of the model; a conversation that takes longer has failed."""
    default_agent_loop: str | None = None
    """A registered name, as verl has it: of the rows that name none in their column `agent_name`."""
    agent_loop_config_path: str | None = None
    """A YAML file of verl's form: a list of `name` and `_target_`."""

    @property
    def default(self) -> str | None:
        """Who leads the conversations of rows that name nobody."""
        return self.path or self.default_agent_loop

    @property
    def enable(self) -> bool:
        return bool(self.agent_loop_config_path or (self.default and self.default not in BUILT_IN))


def agent_settings(given: Mapping[str, Any]) -> AgentSettings:
    """The settings of a checked dict."""
    return settings_of(AgentSettings, given)


def check_agent(checked: Checked) -> Iterator[Finding]:
    """Names, types and ranges; and that one agent is named."""
    rollout = checked.config.actor_rollout_ref.rollout
    wrong = False
    for name, value in rollout.agent.items():
        for what, do in _faults(name, value):
            wrong = True
            yield checked.problem(what, do, KEY)
    if wrong:
        return
    settings = agent_settings(rollout.agent)
    if settings.path and settings.default_agent_loop not in (None, settings.path):
        other = settings.default_agent_loop
        what = f"`{KEY}.path={settings.path}` and `{KEY}.default_agent_loop={other}` are two agents."
        yield checked.problem(what, "keep one of them", KEY)
    idle = [name for name in rollout.agent if name in ("config", "timeout_s")]
    if idle and not settings.enable:
        yield f"{KEY}: {', '.join(idle)} have no effect: no agent is named ({KEY}=FILE.py:NAME)."


def _faults(name: str, value: Any) -> Iterator[Fault]:
    typed = yield from typed_entry(KEY, name, value, AgentSettings)
    if name == "timeout_s" and typed is not None and not typed > 0:
        yield f"`{KEY}.timeout_s={typed}` must be above 0.", "give a larger number, or leave it out"
