"""Environments of verifiers: rows, episodes by the environment's own code, and its reward, with a stand-in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
import torch

from posttrain.commands.generation.loop import Requests
from posttrain.config.root import PPOConfig
from posttrain.conversations.opening import open_conversations
from posttrain.data.rows import load_rows
from posttrain.errors import UserError
from posttrain.rollout.base import Sampling
from tests.serving.scripted_server import END, ScriptedEngine
from tests.tools.call_templates import tokenizer_of

# What the worker uses of verifiers 0.4. An episode asks twice: it repeats what the model said, and wants it said again.
VERIFIERS = """
import json, os, urllib.request
from types import SimpleNamespace as Made


class HarnessConfig: ...
class Harness:
    def __class_getitem__(cls, kind): return cls


class EvalClientConfig(Made): ...
class ModelContext(Made): ...
class UserMessage(Made): ...
class ProgramResult(Made): ...
"""
LOADERS = """
import asyncio, importlib, json, os, urllib.request
from contextlib import asynccontextmanager
from types import SimpleNamespace as Made


class EnvConfig(Made):
    @classmethod
    def model_construct(cls): return cls(agent=Made())
    @classmethod
    def model_validate(cls, given): return cls(**given)


def env_config_type(taskset, id=""): return EnvConfig
def taskset_config_type(name): return EnvConfig
def default_harness_id(name): return "bash"
def harness_class(name): return importlib.import_module(name).Chat if name != "bash" else Made(EXECUTES_CODE=True)
def resolve_env_config(given): return EnvConfig(**given)
def load_taskset(config): return importlib.import_module(config.id).Tasks(config)
def load_environment(config): return Environment(config)


class Environment:
    def __init__(self, config):
        self.config = config
        self.taskset = load_taskset(EnvConfig(**config.taskset))

    @asynccontextmanager
    async def serving(self): yield

    def slots(self, task, n): return [task]

    async def run_slot(self, task, ctx):
        return await asyncio.to_thread(self.play, task, ctx)

    def play(self, task, ctx):
        def ask(messages):
            body = json.dumps({"model": ctx.model, "messages": messages}).encode()
            headers = {"Authorization": "Bearer " + os.environ[ctx.client.api_key_var]}
            url = ctx.client.base_url + "/chat/completions"
            answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
            return answer["choices"][0]["message"]

        if task.data.prompt == "broken":
            return Made(ok=False, errors=[Made(type="TaskError", message="no such room")], traces=[])
        first = ask([{"role": "user", "content": task.data.prompt}])
        asks = [{"role": "user", "content": task.data.prompt}, first, {"role": "user", "content": "again"}]
        reward = float(ask(asks)["content"] == task.data.answer) * self.config.weight
        trained, judge = Made(trainable=True), Made(trainable=False)
        return Made(ok=True, traces=[Made(agent=trained, reward=reward), Made(agent=judge, reward=100.0)])
"""
TASKS = """
from types import SimpleNamespace as Made


class Tasks:
    def __init__(self, config): self.prompts = ["hello", getattr(config, "second", "there"), "broken"]

    def __iter__(self):
        for number, prompt in enumerate(self.prompts):
            system = "Be short." if number else None
            yield Made(data=Made(idx=number, prompt=prompt, system_prompt=system, answer="2" if number == 0 else None))
"""


@pytest.fixture
def verifiers(tmp_path, monkeypatch):
    files = {
        "verifiers/__init__.py": "",
        "verifiers/v1/__init__.py": VERIFIERS,
        "verifiers/v1/configs/__init__.py": "",
        "verifiers/v1/configs/agent.py": "def agent_config_fields(config): return vars(config)\n",
        "verifiers/v1/utils/__init__.py": "",
        "verifiers/v1/utils/loaders.py": LOADERS,
        "echo_tasks.py": TASKS,
    }
    for name, text in files.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=os.pathsep)


def test_rows_are_the_tasks_with_what_gives_each_again(verifiers):
    rows = load_rows("verifiers:echo_tasks?second=here").rows
    assert [row["task_number"] for row in rows] == [0, 1, 2] and rows[0]["ground_truth"] == "2"
    assert rows[0]["prompt"] == "hello" and rows[0]["data_source"] == "echo_tasks"
    here = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "here"}]
    assert rows[1]["prompt"] == here and json.loads(rows[1]["taskset"]) == {"id": "echo_tasks", "second": "here"}
    assert (
        len(load_rows("verifiers:echo_tasks?size=1").rows) == 1 and len(load_rows("verifiers:echo_tasks", limit=2)) == 2
    )


def play(rows: list[dict], name: str = "echo_tasks", **agent):
    """The conversations of rows, by the environment."""
    config, tokenizer, said = PPOConfig(), tokenizer_of("Qwen2.5"), []
    config.actor_rollout_ref.rollout.agent = {"path": f"verifiers:{name}", "timeout_s": 30.0, **agent}
    config.data.max_prompt_length, config.data.max_response_length = 200, 300
    engine = ScriptedEngine(tokenizer, lambda text, seed: f"{text.count('<|im_start|>assistant')}{END}")
    sampling = Sampling(max_tokens=300, stop_token_ids=(tokenizer.convert_tokens_to_ids(END),))
    with open_conversations(config, tokenizer, torch.device("cpu"), said.append) as loop:
        assert loop is not None and any(f"verifiers:{name}" in one for one in said)
        requests = Requests(engine, sampling, loop)
        for number, row in enumerate(rows):
            prompt = [{"role": "user", "content": str(row["prompt"])}]
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            info = {key: value for key, value in row.items() if key in ("taskset", "task_number")}
            given = {"raw_prompt": prompt, "data_source": "d", "ground_truth": "", "extra_info": info, "index": number}
            requests.submit((number, 0), list(ids), number, given)
        while requests.has_work():
            requests.advance()
        return [loop.records[number, 0] for number in range(len(rows))]


def test_episodes_are_trained_with_the_reward_of_the_environments_own_code(verifiers):
    rows = [*load_rows("verifiers:echo_tasks").rows, {"prompt": "a row of another data set"}]
    right, wrong, broken, other = play(rows, config={"weight": 0.5})
    assert (right.score, wrong.score) == (0.5, 0.0), "agent.config reaches the environment; a judge is not trained"
    assert "no such room" in broken.error and "no task of echo_tasks" in other.error
    for record in (right, wrong):
        (row,) = record.rows
        assert record.turns == 2 and sum(row.mask) == 4, "two turns of two tokens, in one row"


def test_code_that_a_model_writes_runs_nowhere_unless_the_user_says_where(verifiers):
    (record,) = play(load_rows("verifiers:echo_tasks", limit=1).rows, config={"agent": {"harness": {"id": "bash"}}})
    assert "executes what the model writes" in record.error
    runtime = {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}
    (record,) = play(load_rows("verifiers:echo_tasks", limit=1).rows, config={"weight": 1.0, "agent": runtime})
    assert record.score == 1.0


def test_what_is_missing_is_said_before_the_run(verifiers, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"cannot load the taskset.*no_such"):
        load_rows("verifiers:no_such_taskset")
    with pytest.raises(UserError, match="there is no interpreter /no/python"):
        load_rows("verifiers:echo_tasks?python=/no/python")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with pytest.raises(UserError, match=r"does not have the package verifiers.*\n.*agent\.python=OWN/bin/python"):
        play([], python=sys.executable)
    with pytest.raises(UserError, match=r"does not have the package verifiers"):
        load_rows("verifiers:echo_tasks")


@pytest.mark.skipif(
    not os.environ.get("VERIFIERS_PYTHON"), reason="VERIFIERS_PYTHON names no interpreter with verifiers"
)
def test_an_environment_of_the_package_itself_plays(monkeypatch):
    python = os.environ["VERIFIERS_PYTHON"]
    examples = Path(__file__).parents[2] / "examples" / "environments"
    monkeypatch.setenv("PYTHONPATH", str(examples), prepend=os.pathsep)
    rows = load_rows(f"verifiers:verifiers_guess?rounds=1&python={python}").rows
    harness = {"agent": {"harness": {"id": "verifiers_guess", "tries": 3}}}
    records = play(rows, "verifiers_guess", config=harness, python=python)
    # The model says 1, then 2, then 3, and stops at the number that is right.
    assert [record.error for record in records] == [None] * 9
    assert [record.turns for record in records] == [1, 2, 3, 3, 3, 3, 3, 3, 3]
    assert [record.score for record in records[:4]] == [1.0, 1.0, 1.0, pytest.approx(8 / 9)]
