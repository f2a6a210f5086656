"""Tools and agents on all machines of a run's Ray, so that the driver's cores do not limit the run.

The driver's worker processes are forked from it. Another machine makes tools and agents anew, from the same settings;
one that cannot make all of them is left out. Which machine leads a conversation, or answers a call, changes no token.
Built-in tools stay in threads of the trainer, and programs (`agent.program`) on its machine.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from posttrain.config.root import PPOConfig
from posttrain.conversations.agent_worker import serve_agents
from posttrain.conversations.agents import Agents
from posttrain.conversations.chat import Setup
from posttrain.conversations.loop import ConversationLoop
from posttrain.conversations.processes import AGENTS_KIND
from posttrain.conversations.settings import TurnSettings, agent_settings
from posttrain.conversations.tools.forks import Serve, spawned
from posttrain.conversations.tools.registry import name_for_model, serve_tools
from posttrain.conversations.tools.runner import TOOLS_KIND
from posttrain.external import import_external
from posttrain.machines.cluster import Machine, Machines

_LOOPBACK = re.compile(r"//(?:[^/@\s]*@)?(localhost|127\.\d+\.\d+\.\d+|\[::1\])")


def has_workers(loop: ConversationLoop) -> bool:
    """Whether there are tools or agents that run in worker processes."""
    return bool(loop.runner.tools.isolated or (loop.runner.processes and loop.agents.isolated))


def spread_conversations(
    loop: ConversationLoop, config: PPOConfig, machines: Machines, say: Callable[[str], object]
) -> None:
    """Runs tools and agents on these machines, too. Close the loop before the machines."""
    library, setup = config.actor_rollout_ref.model.external_lib, loop.setup
    if names := loop.runner.tools.isolated:
        turns = _without(setup.settings, [name for name in loop.runner.tools.tools if name not in names])
        files = (turns.tool_config_path, turns.mcp_config_path)
        places = [turns.tool_config, turns.tools, *map(_text, files)]
        make = partial(serve_tools, library, turns, names)
        if ready := _prepared(machines, TOOLS_KIND, make, places, say):
            loop.runner.tools.spread(ready)
    if loop.runner.processes is not None and (names := loop.agents.isolated):
        settings = loop.agents.settings
        places = [settings.config, _text(settings.agent_loop_config_path), _text(settings.interaction_config_path)]
        make = partial(_agents, config, setup, names)
        if ready := _prepared(machines, AGENTS_KIND, make, places, say):
            loop.runner.processes.spread(ready)


def _prepared(
    machines: Machines, kind: str, make: Callable[[], Serve], places: Sequence[object], say: Callable[[str], object]
) -> Sequence[Machine]:
    """The machines on which workers of a kind can be started, to do what `make` returns there."""
    if found := next((here for place in places if (here := _LOOPBACK.search(str(place)))), None):
        say(f"note: {kind} run on the driver's machine alone: their settings name an address on it ({found[1]}).")
        return ()
    try:
        message = pickle.dumps(make)
    except Exception as error:
        say(f"note: {kind} run on the driver's machine alone: their settings cannot be sent ({error}).")
        return ()
    ready = machines.prepare(kind, partial(spawned, message), f"{kind} do not run", say)
    if ready:
        say(f"{kind.capitalize()} run on {len(ready) + 1} machines.")
    return ready


def _without(turns: TurnSettings, names: Sequence[str]) -> TurnSettings:
    """The settings without tools of these names, which the other machines need not make (an index, a sandbox). Those of
    files are made with the others of their file."""
    called = {entry: name_for_model(entry) for entry in turns.tools}
    dropped = [name for name in called.values() if name in names]
    tools = [entry for entry, name in called.items() if name not in dropped]
    return replace(turns, tools=tools, tool_config={k: v for k, v in turns.tool_config.items() if k not in dropped})


def _text(path: str | None) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace") if path else ""


def _agents(config: PPOConfig, setup: Setup, names: Sequence[str]) -> Serve:
    """What worker processes of agents do. Called on another machine, in the process that they are forked from."""
    if library := config.actor_rollout_ref.model.external_lib:
        import_external(library)
    settings = agent_settings(config.actor_rollout_ref.rollout.agent)
    agents = Agents(settings, setup.settings, {"config": config, "tokenizer": setup.template.tokenizer})
    for name in names:
        agents.agent(name)
    agents.import_modules()
    return serve_agents(agents, setup, settings.timeout_s)
