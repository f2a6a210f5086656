"""`actor_rollout_ref.rollout.multi_turn`: responses of several turns, in which the model calls tools.

The loop over turns owns these settings as one free dict, and checks them here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.config.checked import Checked, Finding, nearest_name
from posttrain.config.free_dict import Fault, settings_of, typed_entry

KEY = "actor_rollout_ref.rollout.multi_turn"
SIDES = ("left", "middle", "right")
_FORMATS = Path(__file__).parents[1] / "conversations" / "formats"
FORMATS = tuple(sorted(file.stem for file in _FORMATS.glob("*.py") if file.stem not in ("__init__", "base")))
"""A format of tool calls is a file; its package is above this one, and is not imported."""


@dataclass(frozen=True)
class TurnSettings:
    """`tools` are names (`calculator`, `python`, `search`) or functions of your own (`FILE.py:NAME`)."""

    enable: bool = False
    """Answer the calls of tools in a response, and let the model go on behind the answer."""
    tools: list[str] = field(default_factory=list)
    """Tools that the model may call."""
    tool_config: dict[str, Any] = field(default_factory=dict)
    """Settings of tools by their names; each tool checks its own."""
    tool_config_path: str | None = None
    """A YAML file with tools of classes written for verl (`tools:` with `class_name`, `config`, `tool_schema`)."""
    max_assistant_turns: int | None = None
    """Turns of the model in one response; null is as many as data.max_response_length has room for."""
    max_parallel_calls: int = 1
    """Calls that are answered in one turn; the model is told of those that were not."""
    max_tool_response_length: int = 1024
    """Characters of a tool's answer that the model is shown; what is left out is marked."""
    tool_response_truncate_side: str = "middle"
    """What is kept of a longer answer: its beginning (`left`), both ends (`middle`) or its end (`right`)."""
    tool_timeout_s: float = 30.0
    """Seconds that a call may take; the model is told of one that takes longer."""
    format: str = "auto"
    """How the model writes calls; `auto` finds the format that reads what the chat template writes."""


_CHOICES = {"tool_response_truncate_side": SIDES, "format": ("auto", *FORMATS)}
_AT_LEAST = {"max_assistant_turns": 1, "max_parallel_calls": 1, "max_tool_response_length": 1, "tool_timeout_s": 0.001}


def turn_settings(given: Mapping[str, Any]) -> TurnSettings:
    """The settings of a checked dict."""
    return settings_of(TurnSettings, given)


def check_turns(checked: Checked) -> Iterator[Finding]:
    """Names, types and ranges; and that there is a tool to call."""
    given = checked.config.actor_rollout_ref.rollout.multi_turn
    wrong = False
    for name, value in given.items():
        for what, do in _faults(name, value):
            wrong = True
            yield checked.problem(what, do, KEY)
    if wrong:
        return
    settings = turn_settings(given)
    if settings.enable and not (settings.tools or settings.tool_config_path):
        what = f"`{KEY}.enable=True`, but there is no tool that the model could call."
        yield checked.problem(what, "name some: actor_rollout_ref.rollout.tools=[calculator]", KEY)
    if not settings.enable and len(given) > ("enable" in given):
        idle = ", ".join(name for name in given if name != "enable")
        yield f"{KEY}: {idle} have no effect: {KEY}.enable is False, so that no tool is called."


def _faults(name: str, value: Any) -> Iterator[Fault]:
    typed = yield from typed_entry(KEY, name, value, TurnSettings)
    if typed is None:
        return
    if name in _CHOICES and typed not in _CHOICES[name]:
        known = _CHOICES[name]
        yield f"`{KEY}.{name}={typed}` is not known; known: {', '.join(known)}.", nearest_name(typed, known)
    if name in _AT_LEAST and typed < _AT_LEAST[name]:
        yield f"`{KEY}.{name}={typed}` must be {_AT_LEAST[name]} or more.", "give a larger number, or leave it out"
