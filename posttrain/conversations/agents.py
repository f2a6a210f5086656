"""Agents by name: the built-in ones, those of a user's file, those of `register_agent`, and those of verl's YAML file.

An agent is `async def lead(chat, row)`: it leads one conversation, and returns its reward or None.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from posttrain.conversations.adapters import OPENENV, InteractionEnvironment, Interactions, OpenEnv, check_server
from posttrain.conversations.chat import Chat
from posttrain.conversations.environments import is_environment, lacks_step, method_schemas, play
from posttrain.conversations.settings import AGENT_KEY as KEY
from posttrain.conversations.settings import BUILT_IN, PROGRAM, AgentSettings, TurnSettings
from posttrain.conversations.tools.lookup import find_named, is_place, listed_in
from posttrain.errors import UserError, first_line
from posttrain.registry import Registry
from posttrain.spelling import closest

Made = TypeVar("Made", bound=Callable[..., Any])
AGENTS: Registry[Any] = Registry("agent")
"""Name -> the function or class that leads a conversation."""


def register_agent(name: str) -> Callable[[Made], Made]:
    """Registers an `async def` function, a class with `async def run`, or an environment, under a name."""
    return AGENTS.register(name)


@dataclass(frozen=True)
class Agent:
    """What leads a conversation. One that is `inline` awaits nothing but its chat (`runner.py`); one that is `isolated`
    runs in a worker process (`processes.py`)."""

    lead: Callable[[Chat, dict[str, Any]], Coroutine[Any, Any, Any]]
    inline: bool = False
    isolated: bool = True
    imports: str = ""
    """A module that its worker processes have imported before they start."""
    tools: Sequence[dict[str, Any]] = ()
    """Schemas of tools that it answers itself."""


class Agents:
    """The agent of each row: that of its column `agent_name`, or the run's. Agents of verl's kind are made with
    `context`: the run's settings and its tokenizer."""

    def __init__(self, settings: AgentSettings, turns: TurnSettings, context: Mapping[str, Any]) -> None:
        self.settings, self.turns, self.context = settings, turns, context
        self.listed = _listed(settings.agent_loop_config_path) if settings.agent_loop_config_path else {}
        path = settings.interaction_config_path
        self.interactions = Interactions(path) if path else None
        self._made: dict[str, Agent] = {}
        if settings.enable and settings.default:
            self.agent(settings.default)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the run's agent answers itself."""
        return list(self.agent(self.settings.default).tools) if self.settings.enable and self.settings.default else []

    @property
    def isolated(self) -> list[str]:
        """Those so far that run in worker processes."""
        return [name for name, agent in self._made.items() if agent.isolated and not agent.inline]

    def import_modules(self) -> None:
        """Imports what the agents need, in the process that their worker processes are forked from."""
        for agent in self._made.values():
            if agent.imports:
                with suppress(Exception):  # said by the conversation that needs it
                    importlib.import_module(agent.imports)

    def __call__(self, row: Mapping[str, Any]) -> Agent:
        built_in = "tool_agent" if self.turns.enable else "single_turn_agent"
        if not self.settings.enable:  # rows of verl's data sets name its own loops, whatever the run does
            return self.agent(built_in)
        return self.agent(name_of(row) or self.settings.default or built_in)

    @property
    def waiting(self) -> int:
        """Conversations whose programs have not started, because others must end first."""
        return self.context["programs"].waiting if "programs" in self.context else 0

    def agent(self, name: str) -> Agent:
        """The agent of a name; UserError if there is none."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Agent:
        config = self.settings.config if name == self.settings.default else {}
        if name in self.listed:
            entry = self.listed[name]
            given = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
            return self._agent(_find(entry["_target_"]), name, {**given, **config})
        if name in AGENTS:
            return self._agent(AGENTS[name], name, config)
        if name == PROGRAM and self.settings.uses_http:
            # The programs' server is opened behind this (`opening.py`).
            return Agent(lambda chat, row: self.context["programs"].lead(chat, row), isolated=False)
        if name == "single_turn_agent":
            return Agent(_one_turn, isolated=False)
        if name == "tool_agent":
            if (interactions := self.interactions) is not None:
                lead = play(lambda: InteractionEnvironment(interactions), name, {}, self.turns.max_assistant_turns)
                return Agent(lead, isolated=interactions.isolated)
            if self.turns.enable:
                return tool_agent(self.turns.max_assistant_turns)
            raise UserError(
                "the agent tool_agent answers the model's tool calls, and the run has no tools.\n"
                "  to do:  set rollout.multi_turn.enable=True and name them: rollout.tools=[...]"
            )
        if name.startswith(OPENENV):
            say = self.context.get("say", lambda text: None)
            return self._agent(OpenEnv, name, {"url": check_server(name, config, say), **config})
        if is_place(name):
            return self._agent(_find(name), name, config)
        known = [*self.listed, *AGENTS, *BUILT_IN]
        near = closest(name, known)
        raise UserError(
            f"there is no agent {name!r}.{f' Did you mean {near}?' if near else ''} Known: {', '.join(known)}.\n"
            f"  to do:  {KEY}=FILE.py:NAME, or have its file loaded: actor_rollout_ref.model.external_lib=FILE.py, or "
            f"{KEY}.agent_loop_config_path=FILE.yaml"
        )

    def _agent(self, source: Any, name: str, config: Mapping[str, Any]) -> Agent:
        return make_agent(source, name, config, self.context, self.turns.max_assistant_turns)


def tool_agent(max_turns: int | None) -> Agent:
    """The built-in agent: answers the model's tool calls until a turn has none, or has no turn left."""

    async def lead(chat: Chat, row: dict[str, Any]) -> None:
        while True:
            await chat.generate(stop=chat.call_format.stop)
            calls = chat.tool_calls()
            if not calls:
                return
            if max_turns is not None and chat.turns >= max_turns:
                chat.end("turns")
                return
            await chat.answer(calls)

    return Agent(lead, inline=True)


async def _one_turn(chat: Chat, row: dict[str, Any]) -> None:
    await chat.generate()


def name_of(row: Mapping[str, Any]) -> str | None:
    """The agent of a row, by its column `agent_name`."""
    info = row.get("extra_info")
    return (info.get("agent_name") if isinstance(info, dict) else None) or None


def make_agent(
    source: Any, name: str, config: Mapping[str, Any], context: Mapping[str, Any], max_turns: int | None = None
) -> Agent:
    """The agent of a function, of a class with `run`, or of an environment; `config` goes to the keywords of each."""
    isolated = bool(getattr(source, "isolated", True))
    if is_environment(source):
        tools = [] if hasattr(source, "step") else method_schemas(source)
        lead, imports = play(source, name, config, max_turns), getattr(source, "imports", "")
        return Agent(lead, isolated=isolated, imports=imports, tools=tools)
    if lacks_step(source):
        raise UserError(
            f"the environment {name} has `reset` but no `step`, and no methods that are tools.\n"
            "  to do:  write `def step(self, action)`, which returns (observation, reward, done)"
        )
    try:
        if hasattr(source, "as_agent"):  # verl's classes are made anew for each conversation
            return Agent(source.as_agent(context, **config), isolated=isolated)
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
    return Agent(lambda chat, row: function(chat, row, **config), isolated=isolated)


def _find(name: str) -> Any:
    return find_named(name, "agent", _could_be)


def _could_be(value: Any) -> bool:
    return inspect.iscoroutinefunction(value) or hasattr(value, "run") or is_environment(value)


def _listed(path: str) -> dict[str, dict[str, Any]]:
    """The entries of a YAML file, by name."""
    entries = listed_in(path, "agents")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"the file of agents {path} is no list of `name` and `_target_`.")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "_target_")):
            raise UserError(f"entry {number} of the file of agents {path} has no `name` and `_target_`.")
    return {entry["name"]: entry for entry in entries}
