"""Agents by name: those of a user's file, those that `register_agent` makes known, and those of verl's YAML file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from posttrain.config.agent import BUILT_IN, KEY, AgentSettings
from posttrain.config.closest import closest
from posttrain.errors import UserError, first_line
from posttrain.registry import Registry
from posttrain.rollout.agents.chat import Chat
from posttrain.rollout.agents.loop import Lead
from posttrain.rollout.tools.finding import find_named, is_place, listed_in

Made = TypeVar("Made", bound=Callable[..., Any])
AGENTS: Registry[Any] = Registry("agent")
"""Name -> the function or class that leads a conversation."""


def register_agent(name: str) -> Callable[[Made], Made]:
    """Makes an `async def` function, or a class with `async def run`, known under a name."""
    return AGENTS.register(name)


class Leads:
    """The agent of a row: that of its column `agent_name`, or the run's. `told` is what agents of verl's kind are made
    with: the run's settings and its tokenizer."""

    def __init__(self, settings: AgentSettings, told: Mapping[str, Any]) -> None:
        self.settings, self.told = settings, told
        self.listed = _listed(settings.agent_loop_config_path) if settings.agent_loop_config_path else {}
        self._made: dict[str, Lead] = {}
        if settings.default:
            self.lead(settings.default)

    def __call__(self, row: Mapping[str, Any]) -> Lead:
        return self.lead(name_of(row) or self.settings.default or "single_turn_agent")

    def lead(self, name: str) -> Lead:
        """The agent of a name; UserError in words if it cannot be had."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Lead:
        config = self.settings.config if name == self.settings.default else {}
        if name in self.listed:
            entry = self.listed[name]
            given = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
            return made(_place(entry["_target_"]), name, {**given, **config}, self.told)
        if name in AGENTS:
            return made(AGENTS[name], name, config, self.told)
        if name == "single_turn_agent":
            return _one_turn
        if name == "tool_agent":
            raise UserError(
                "the agent tool_agent is posttrain's own loop over tools, which leads all conversations of a run or "
                f"none.\n  to do:  leave {KEY} out, and set rollout.multi_turn.enable=True"
            )
        if is_place(name):
            return made(_place(name), name, config, self.told)
        known = [*self.listed, *AGENTS, *BUILT_IN]
        near = closest(name, known)
        raise UserError(
            f"there is no agent {name!r}.{f' Did you mean {near}?' if near else ''} Known: {', '.join(known)}.\n"
            f"  to do:  {KEY}=FILE.py:NAME, or have its file loaded: actor_rollout_ref.model.external_lib=FILE.py, or "
            f"{KEY}.agent_loop_config_path=FILE.yaml"
        )


def name_of(row: Mapping[str, Any]) -> str | None:
    """Who leads a row's conversation, by its column `agent_name`."""
    info = row.get("extra_info")
    return (info.get("agent_name") if isinstance(info, dict) else None) or None


def made(source: Any, name: str, config: Mapping[str, Any], told: Mapping[str, Any]) -> Lead:
    """`async def lead(chat, row)` of a function, or of a class with `run`; `config` goes to the keywords of either."""
    try:
        if hasattr(source, "as_agent"):  # verl's classes are made anew for each conversation
            return source.as_agent(told, **config)
        if inspect.isclass(source):
            source, config = source(**config), {}
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the agent {name} cannot be made: {type(error).__name__}: {first_line(error)}") from error
    function = source if inspect.isroutine(source) else getattr(source, "run", None)
    if not inspect.iscoroutinefunction(function):
        kind = "its `run` is no coroutine" if function is not source else "it is no coroutine"
        own = "run(self, " if function is not source else f"{getattr(source, '__name__', name)}("
        raise UserError(f"the agent {name}: {kind}.\n  to do:  write it as `async def {own}chat, row)`")
    assert function is not None
    try:
        inspect.signature(function).bind(None, None, **config)
    except TypeError as error:
        called = "".join(f", {key}=..." for key in config)
        raise UserError(
            f"the agent {name} is called as `agent(chat, row{called})`, and does not take that: {error}.\n"
            f"  to do:  write it as `async def NAME(chat, row, *, SETTING=...)`; {KEY}.config has the settings"
        ) from None

    async def lead(chat: Chat, row: dict[str, Any]) -> Any:
        return await function(chat, row, **config)

    return lead


async def _one_turn(chat: Chat, row: dict[str, Any]) -> None:
    await chat.say()


def _place(name: str) -> Any:
    return find_named(name, "agent", lambda value: inspect.iscoroutinefunction(value) or hasattr(value, "run"))


def _listed(path: str) -> dict[str, dict[str, Any]]:
    """The entries of a YAML file, by name."""
    entries = listed_in(path, "agents")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"the file of agents {path} is no list of `name` and `_target_`.")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "_target_")):
            raise UserError(f"entry {number} of the file of agents {path} has no `name` and `_target_`.")
    return {entry["name"]: entry for entry in entries}
