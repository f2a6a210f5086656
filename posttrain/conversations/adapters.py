"""Conversations led by what was written for other systems: verl's interactions, servers of OpenEnv, verifiers.

An interaction of verl is a class that answers the model's turns as a user would, named in a YAML file:

interaction:
  - name: gsm8k
    class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {...}

A row chooses one in `extra_info.interaction_kwargs.name`. One object of a class serves all conversations of a process;
`start_interaction` opens one, `generate_response` answers a turn, `finalize_interaction` closes it.

`actor_rollout_ref.rollout.agent=openenv:http://127.0.0.1:8000` plays environments of an OpenEnv server. A conversation
is one session of the server. What the model says becomes the action: the text itself where the action has one field,
otherwise the JSON object in it. The package is imported in the worker processes of agents alone.

`actor_rollout_ref.rollout.agent=verifiers:NAME` plays an environment of the package verifiers, which drives the model
itself, by a base URL. So it is a program that is started once for the run (`programs.py`), in the interpreter of
`agent.python`: the package does not fit together with many others.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import json
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from posttrain.conversations.conversation import ChatError
from posttrain.conversations.settings import AGENT_KEY as KEY
from posttrain.conversations.settings import VERIFIERS, AgentSettings
from posttrain.conversations.tools.lookup import find_named, read_entries
from posttrain.errors import UserError, first_line
from posttrain.external import find_missing
from posttrain.spelling import closest


class Interactions:
    """The interactions of a run, by name."""

    def __init__(self, path: str) -> None:
        self.path, self.by_name = path, dict[str, Any]()
        for number, entry in enumerate(read_entries(path, "interactions", "interaction")):
            name, made = _made(entry, f"interaction[{number}] of {path}")
            if name in self.by_name:
                raise UserError(f"two interactions of {path} are called {name}: rows could not choose one.")
            self.by_name[name] = made

    @property
    def names(self) -> list[str]:
        return list(self.by_name)

    @property
    def isolated(self) -> bool:
        """Whether they run in worker processes; one class that says no keeps all of them in the trainer."""
        return all(getattr(one, "isolated", True) for one in self.by_name.values())

    def name_of(self, info: Any) -> str:
        """The interaction that a row with this `extra_info` chooses; UserError if there is none."""
        given = info.get("interaction_kwargs") if isinstance(info, Mapping) else None
        name = given.get("name") if isinstance(given, Mapping) else None
        if name is None and len(self.by_name) == 1:
            return self.names[0]
        if name is None:
            raise UserError(
                f"a row names no interaction, and {self.path} has {', '.join(self.by_name)}.\n"
                "  to do:  name one in each row: extra_info.interaction_kwargs.name"
            )
        if name not in self.by_name:
            near = closest(str(name), self.by_name)
            hint = f" Did you mean {near}?" if near else ""
            raise UserError(
                f"rows name the interaction {name} (extra_info.interaction_kwargs.name), and {self.path} has "
                f"{', '.join(self.by_name)}.{hint}"
            )
        return str(name)

    def of(self, info: Any) -> Any:
        return self.by_name[self.name_of(info)]


class InteractionEnvironment:
    """A conversation with an interaction, as an environment."""

    takes_messages = True
    gives_score = False  # as in verl, where reward functions score

    def __init__(self, interactions: Interactions) -> None:
        self._interactions, self._inner = interactions, None
        self._scores = list[float]()

    async def reset(self, row: dict[str, Any], seed: int) -> None:
        info = row.get("extra_info")
        self._inner = self._interactions.of(info)
        self._given = dict((info or {}).get("interaction_kwargs") or {})
        self._id = uuid4().hex
        started = await self._inner.start_interaction(self._id, **self._given)
        self._id = started if isinstance(started, str) else self._id

    async def step(self, messages: list[dict[str, Any]]) -> tuple[str, float, bool, dict[str, Any]]:
        assert self._inner is not None
        said = await self._inner.generate_response(self._id, messages, **self._given)
        if not isinstance(said, tuple) or len(said) != 4:
            raise ChatError("generate_response gives (should_terminate, response, score, metadata)")
        is_over, response, score, metadata = said
        if score is not None:
            self._scores.append(float(score))
        facts = dict(metadata) if isinstance(metadata, Mapping) else {}
        return response, float(score or 0.0), bool(is_over), facts | {"turn_scores": list(self._scores)}

    async def close(self) -> None:
        if self._inner is None or not hasattr(self._inner, "finalize_interaction"):
            return
        finalize = self._inner.finalize_interaction
        ended = finalize(self._id) if inspect.signature(finalize).parameters else finalize()
        if inspect.isawaitable(ended):
            await ended


def _made(entry: Any, where: str) -> tuple[str, Any]:
    """(its name, the object)."""
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise UserError(f"{where} has no class_name.")
    class_name = entry["class_name"]
    make: Any = find_named(class_name, "interaction", _could_be)
    missing = [name for name in ("start_interaction", "generate_response") if not _is_async(make, name)]
    if missing:
        raise UserError(f"{where}: {class_name} is no interaction: it has no `async def {missing[0]}`.")
    last = class_name.rpartition(".")[2].rpartition(":")[2]
    name = str(entry.get("name") or last.removesuffix("Interaction").lower() or last.lower())
    try:
        return name, make(config={**(entry.get("config") or {}), "name": name})
    except Exception as error:
        raise UserError(f"{where}: {class_name} cannot be made: {type(error).__name__}: {first_line(error)}") from error


def _could_be(value: Any) -> bool:
    return inspect.isclass(value) and _is_async(value, "generate_response")


def _is_async(kind: Any, method: str) -> bool:
    return inspect.iscoroutinefunction(getattr(kind, method, None))


OPENENV = "openenv:"
_WAIT_S = 5.0
_NO_LIMIT = 1e6
_START_S = 30.0
"""How long a run waits for a server that is just being started: importing openenv takes several seconds."""


def check_server(name: str, config: Mapping[str, Any], say: Callable[[str], None]) -> str:
    """The address of a server that answers and has the fields of `config`; UserError otherwise, or without the
    package."""
    url = name.removeprefix(OPENENV).rstrip("/")
    if importlib.util.find_spec("openenv") is None:
        raise UserError(
            f"the environment {name} needs the package openenv.\n  to do:  pip install 'posttrain[openenv]'"
        )
    if not url.startswith(("http://", "https://")):
        raise UserError(f"the environment {name} has no address.\n  to do:  {OPENENV}http://HOST:PORT")
    read_schema.cache_clear()  # another server may have this address since the last run
    try:
        schema = _wait_for_schema(url, say)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(
            f"no OpenEnv server answers at {url}: {reason}.\n"
            "  to do:  start it, for example: uvicorn my_env:app --port 8000"
        ) from None
    for part in ("action", "observation"):
        setting, known = f"{part}_field", _fields(schema, part)
        if (field := config.get(setting)) is not None and field not in known:
            near = closest(str(field), known)
            raise UserError(
                f"{KEY}.config.{setting}={field}: the {part} of {url} has no such field."
                f"{f' Did you mean {near}?' if near else ''} It has: {', '.join(known)}."
            )
    return url


def _wait_for_schema(url: str, say: Callable[[str], None]) -> dict[str, Any]:
    deadline, has_said = time.monotonic() + _START_S, False
    while True:
        try:
            return read_schema(url)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > deadline:
                raise
        if not has_said:
            say(f"Waiting up to {_START_S:g} seconds for an OpenEnv server at {url}")
            has_said = True
        time.sleep(0.2)


@functools.lru_cache  # forked worker processes inherit it, so that a thousand sessions do not ask a thousand times
def read_schema(url: str) -> dict[str, Any]:
    """The JSON schemas of the server's action and observation; ValueError if it gives something else."""
    with urllib.request.urlopen(f"{url}/schema", timeout=_WAIT_S) as answer:
        schema = json.load(answer)
    if not (isinstance(schema, dict) and isinstance(schema.get("action"), dict)):
        raise ValueError(f"{url}/schema does not describe an action")
    return schema


def _fields(schema: Mapping[str, Any], part: str) -> dict[str, Any]:
    properties = (schema.get(part) or {}).get("properties") or {}
    return {name: one for name, one in properties.items() if name != "metadata"}


class OpenEnv:
    """One session. `action_field` and `observation_field` name what the model's text is, and what it reads, where the
    schema leaves a choice."""

    imports = "openenv.core"

    def __init__(self, url: str, action_field: str | None = None, observation_field: str | None = None) -> None:
        self.url, self.action_field, self.observation_field = url, action_field, observation_field
        self._client: Any = None

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        from openenv.core import GenericEnvClient  # pyright: ignore

        self._fields = _fields(await asyncio.to_thread(read_schema, self.url), "action")
        # `agent.timeout_s` limits an agent's time; the client's own limits are shorter than a thousand sessions take to
        # open at once.
        self._client = GenericEnvClient(base_url=self.url, connect_timeout_s=_NO_LIMIT, message_timeout_s=_NO_LIMIT)
        await self._client.__aenter__()
        try:
            result = await self._client.reset(seed=seed)
        except RuntimeError as error:
            raise self._server_error("reset", error) from None
        return self._show(result.observation) or None  # without one the row's prompt stays

    async def step(self, action: str) -> tuple[str, float, bool]:
        try:
            result = await self._client.step(self._read(action))
        except (RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                raise self._server_error("step", error) from None
            fields = ", ".join(f"{name} ({one.get('type', 'any')})" for name, one in self._fields.items())
            return f"This is no action. It has: {fields}.", 0.0, False
        return self._show(result.observation), float(result.reward or 0.0), bool(result.done)

    def _server_error(self, method: str, error: RuntimeError) -> ChatError:
        if "CAPACITY_REACHED" in str(error):
            return ChatError(  # what to do comes first: summaries of a step show the beginning
                "max_concurrent_envs of the OpenEnv server's create_app is below data.train_batch_size times rollout.n"
                f": {error}"
            )
        return ChatError(f"{method} failed in the OpenEnv server at {self.url}, which may have logged more: {error}")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)

    def _read(self, text: str) -> dict[str, Any]:
        """The action of a text; ValueError if it is none."""
        field = self.action_field or (next(iter(self._fields)) if len(self._fields) == 1 else None)
        if field is None:
            found = json.loads(text[text.index("{") : text.rindex("}") + 1])
            return found if isinstance(found, dict) else {}
        kind = self._fields.get(field, {}).get("type")
        value = {"integer": int, "number": float, "boolean": json.loads}.get(kind, str)(text.strip())
        return {field: value}

    def _show(self, observation: Mapping[str, Any]) -> str:
        if self.observation_field:
            return str(observation.get(self.observation_field, ""))
        shown = {name: value for name, value in observation.items() if name not in ("metadata", "done", "reward")}
        texts = [value for value in shown.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 == len(shown) else json.dumps(shown) if shown else ""


_WORKER = Path(__file__).with_name("verifiers_worker.py")


def as_program(settings: AgentSettings) -> AgentSettings:
    """Settings in which an environment of verifiers is a program; others as they are. UserError without the package."""
    name = settings.path or ""
    if not name.startswith(VERIFIERS):
        return settings
    if why := find_missing(settings.python, "verifiers"):
        raise UserError(
            f"the environment {name} cannot be used: {why}.\n"
            "  to do:  python -m venv OWN && OWN/bin/pip install verifiers (its packages do not fit together with the "
            f"trainer's), and {KEY}.python=OWN/bin/python"
        )
    # -P: the folder of the worker is no place to import from; modules there have names that others have, too.
    config = {"taskset": name.removeprefix(VERIFIERS), "settings": settings.config}
    command = [settings.python or sys.executable, "-P", str(_WORKER), "play", json.dumps(config)]
    return replace(settings, path=None, program=shlex.join(command), program_per="run", config={})
