"""Plays samples of a run with an environment of the package verifiers (0.4), in the interpreter that has it.

    python -P verifiers_worker.py rows TASKSET LIMIT        prints the tasks: {"tasks": [...]} or {"error": ...}
    python -P verifiers_worker.py play SETTINGS             plays what the run of POSTTRAIN_RUN_URL gives out

This file imports nothing of posttrain, which that interpreter need not have (`adapters.py`). A task becomes an episode
by the environment's own code. Its requests go to the run's server, with the id of the sample as the model's name:
verifiers keeps a client for every address, and samples are many. The reward of the episode goes back.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from contextlib import AsyncExitStack
from importlib.machinery import ModuleSpec
from itertools import islice
from typing import Any

import verifiers.v1 as vf  # pyright: ignore
from aiohttp import ClientSession, ClientTimeout, TCPConnector
from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore
from verifiers.v1.utils import loaders  # pyright: ignore

CHAT = "posttrain_chat"
_ASK_AGAIN_S = 0.05


class ChatConfig(vf.HarnessConfig):
    pass


class Chat(vf.Harness[ChatConfig]):
    """One turn of the model behind the conversation so far, in this process. It takes the place of verifiers' own chat
    program, which fetches `uv` and starts a process for every turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if mcp_urls:
            raise ValueError("tools need a harness of verifiers' own: agent.config.agent.harness.id=null")
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            prompt = [vf.UserMessage(content=prompt)]
        messages = [one.model_dump(mode="json", exclude_none=True) for one in prompt or []]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        url, body = f"{endpoint.rstrip('/')}/chat/completions", {"model": ctx.model, "messages": messages}
        key = {"Authorization": f"Bearer {secret}"}
        async with ClientSession(timeout=ClientTimeout(None)) as http, http.post(url, json=body, headers=key) as answer:
            return vf.ProgramResult(exit_code=0 if answer.ok else 1, stdout="", stderr=await answer.text())


def register_chat() -> None:
    """verifiers finds a harness by the name of a module."""
    module = types.ModuleType(CHAT)
    vars(module).update(Chat=Chat, __all__=["Chat"], __spec__=ModuleSpec(CHAT, None))
    sys.modules[CHAT] = module


def make_environment(taskset: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The environment of a taskset. Roles without a harness get the one above, unless the taskset brings its own."""
    kind = loaders.env_config_type(taskset["id"], settings.get("id", ""))
    given = {**settings, "taskset": taskset}
    own = loaders.default_harness_id(taskset["id"])
    for role in agent_config_fields(kind.model_construct()):
        seat = given[role] = dict(given.get(role) or {})
        seat.setdefault("harness", {"id": CHAT if own == "bash" else own})
        if "runtime" not in seat:
            harness = loaders.harness_class(seat["harness"].get("id", own))
            if harness.EXECUTES_CODE:
                raise ValueError(
                    f"the harness {seat['harness'].get('id', own)} executes what the model writes: name where, with "
                    f"agent.config.{role}.runtime.type=docker (or subprocess, if it is safe here)"
                )
            seat["runtime"] = {"type": "subprocess"}
    return loaders.load_environment(loaders.resolve_env_config(given))


def print_tasks(taskset: dict[str, Any], limit: int) -> None:
    """The tasks as rows: what a run shows of them, and what gives the task again."""
    found = loaders.load_taskset(loaders.taskset_config_type(taskset["id"]).model_validate(taskset))
    tasks = []
    for task in islice(found, limit):
        prompt = task.data.prompt
        if prompt is not None and not isinstance(prompt, str):
            prompt = [one.model_dump(mode="json", exclude_none=True) for one in prompt]
        answer = getattr(task.data, "answer", None)
        tasks.append({"prompt": prompt, "system": task.data.system_prompt, "answer": answer, "number": task.data.idx})
    print(json.dumps({"tasks": tasks}))


class Player:
    """Asks the run for samples, and plays all that it gets at once."""

    def __init__(self, taskset: str, settings: dict[str, Any]) -> None:
        self.taskset, self.settings = taskset, settings
        self.run, key = os.environ["POSTTRAIN_RUN_URL"], os.environ["POSTTRAIN_API_KEY"]
        self._headers = {"Authorization": f"Bearer {key}"}
        self.client = vf.EvalClientConfig(base_url=f"{self.run}/v1", api_key_var="POSTTRAIN_API_KEY")
        self._environments: dict[str, tuple[Any, _Tasks]] = {}
        self._opened = AsyncExitStack()
        self._opening = asyncio.Lock()

    async def play_all(self) -> None:
        playing = set[asyncio.Task[None]]()
        async with ClientSession(
            headers=self._headers, timeout=ClientTimeout(None), connector=TCPConnector(limit=0)
        ) as http:
            while True:
                async with http.post(f"{self.run}/s/next", json={}, raise_for_status=True) as answer:
                    found = await answer.json()
                if found["id"] is None:
                    await asyncio.sleep(_ASK_AGAIN_S)
                    continue
                task = asyncio.create_task(self._play(http, found["id"], found["task"]))
                playing.add(task)  # an event loop holds tasks weakly
                task.add_done_callback(playing.discard)

    async def _play(self, http: ClientSession, id: str, row: dict[str, Any]) -> None:
        try:
            ended = "reward", {"reward": await self._reward(id, row)}
        except BaseException as error:  # verifiers raises SystemExit where it wants to sign in somewhere
            ended = "end", {"error": f"{type(error).__name__}: {error}"}
        async with http.post(f"{self.run}/s/{id}/{ended[0]}", json=ended[1]):
            pass  # status 404 where the run has given it up meanwhile

    async def _reward(self, id: str, row: dict[str, Any]) -> float:
        info = row.get("extra_info") or {}
        if json.loads(info.get("taskset") or "{}").get("id") != self.taskset:
            raise ValueError(f"the row is no task of {self.taskset}: set data.train_files=verifiers:{self.taskset}")
        environment, tasks = await self._environment(info["taskset"])
        (slot,) = environment.slots(tasks[info["task_number"]], 1)
        episode = await environment.run_slot(slot, vf.ModelContext(model=id, client=self.client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in errors) or "the episode failed")
        rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
        return sum(rewards) / len(rewards)

    async def _environment(self, taskset: str) -> tuple[Any, _Tasks]:
        async with self._opening:
            if taskset not in self._environments:
                made = make_environment(json.loads(taskset), self.settings)
                await self._opened.enter_async_context(made.serving())
                self._environments[taskset] = made, _Tasks(made.taskset)
            return self._environments[taskset]


class _Tasks:
    """Tasks by their number, read as far as they are asked for: a taskset may be endless."""

    def __init__(self, taskset: Any) -> None:
        self._rest, self._known = iter(taskset), []

    def __getitem__(self, number: int) -> Any:
        while len(self._known) <= number:
            self._known.append(next(self._rest))
        return self._known[number]


def main(verb: str, *arguments: str) -> None:
    sys.path.insert(0, os.getcwd())  # a taskset may be a module of the working folder
    register_chat()
    if verb == "play":
        asyncio.run(Player(**json.loads(arguments[0])).play_all())
        return
    try:
        print_tasks(json.loads(arguments[0]), int(arguments[1]))
    except BaseException as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))


if __name__ == "__main__":
    main(*sys.argv[1:])
