"""The examples of docs/environments.md train, with stand-ins for the packages; with the packages themselves if slow
tests run where these are installed."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet
import pytest

from posttrain.conversations.tools.base import ToolCall
from posttrain.conversations.tools.registry import make_tools
from posttrain.conversations.tools.runner import ToolRunner
from tests.docs.test_examples import EXAMPLES, all_started, check_examples, check_what_it_resolves_to
from tests.tools.fake_mcp import SESSION
from tests.tools.fake_packages import GYM

FOLDER = EXAMPLES / "environments"
QUICK = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.export_hf=none"]

OPENENV = {
    "openenv/core/env_server.py": "class State: ...\n",
    "openenv/core/__init__.py": f"""
import sys


class Values:
    def __init__(self, **values):
        vars(self).update(values)


class Action(Values): ...


class Observation(Values): ...


class Environment: ...


def create_app(*_, **__): ...


class Result:
    def __init__(self, told):
        self.observation, self.reward, self.done = {{"text": told.text}}, told.reward, told.done


class GenericEnvClient:
    '''Plays the example's game in its own process.'''

    def __init__(self, base_url, **_):
        sys.path.insert(0, {str(FOLDER)!r})
        from openenv_server import Guess, NumberGame
        self.game, self.action = NumberGame(), Guess

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_): ...

    async def reset(self, seed):
        return Result(self.game.reset(seed=seed))

    async def step(self, action):
        return Result(self.game.step(self.action(**action)))
""",
}
MCP = {
    "mcp/server.py": """
class MCPServer:
    def __init__(self, name): ...

    def tool(self):
        return lambda function: function
""",
    "mcp/client/stdio.py": """
import contextlib


@contextlib.asynccontextmanager
async def stdio_client(server, **_):
    yield server.args[-1], None
""",
    "mcp/__init__.py": f"""
import runpy
{SESSION}
    async def list_tools(self):
        schema = {{"type": "object", "properties": {{"thing": {{"type": "string"}}}}, "required": ["thing"]}}
        tool = type("T", (), {{"name": "where", "description": "Finds.", "input_schema": schema}})
        return type("R", (), {{"tools": [tool]}})

    async def call_tool(self, name, arguments):
        try:
            text, failed = runpy.run_path(self.server)[name](**arguments), False
        except ValueError as error:
            text, failed = str(error), True
        part = type("P", (), {{"type": "text", "text": text}})
        return type("R", (), {{"content": [part], "is_error": failed}})


class StdioServerParameters:
    def __init__(self, command, args, env):
        self.args = args
""",
}


@pytest.fixture
def train(tiny_model, tmp_path, monkeypatch):
    """Runs what a script starts at last under SMOKE=1, in this process, with a tiny model; gives the last samples."""
    from posttrain.trainer import main_ppo

    def run(started: list[list[str]], name: str) -> list[dict]:
        monkeypatch.chdir(tmp_path)
        own = [*QUICK, f"actor_rollout_ref.model.path={tiny_model}"]
        monkeypatch.setattr(sys, "argv", ["main_ppo", *started[-1][2:], *own])
        assert main_ppo.cli() == 0
        return pyarrow.parquet.read_table(tmp_path / f"out/environments/{name}/samples/step_2.parquet").to_pylist()

    return run


def test_the_openenv_example_plays_its_game_and_trains(packages, serve_schema, train, tmp_path, monkeypatch):
    packages(OPENENV)
    schema = {name: {"properties": {one: {"type": kind}}} for name, one, kind in FIELDS}
    monkeypatch.setenv("URL", serve_schema(schema)[0].removeprefix("openenv:"))
    samples = train(all_started(FOLDER / "run_openenv.sh", tmp_path, smoke=True), "openenv")
    assert len(samples) == 16 and not any(row["error"] for row in samples)
    assert all("guess 1 to 9" in row["prompt"] for row in samples)
    sys.path.insert(0, str(FOLDER))
    try:
        from openenv_server import Guess, NumberGame
    finally:
        sys.path.remove(str(FOLDER))
    game = NumberGame()
    game.reset(seed=3)
    near = 9 if game.secret < 9 else 8
    told = [game.step(Guess(number=number)) for number in (near, game.secret)]
    assert [(one.text, one.done) for one in told] == [("lower" if near > game.secret else "higher", False), ("", True)]
    assert [one.reward for one in told] == [0, 1]


FIELDS = (("action", "number", "integer"), ("observation", "text", "string"))


def test_the_mcp_example_shows_calls_and_giving_up_and_trains(packages, train, tmp_path):
    packages(MCP)
    check_what_it_resolves_to(FOLDER / "run_mcp.sh", tmp_path)
    started = all_started(FOLDER / "run_mcp.sh", tmp_path, smoke=True)
    assert started[0][:3] == ["-m", "posttrain", "sft"]
    rows = {name: _read(tmp_path / f"out/environments/mcp_rows/{name}.jsonl") for name in ("talks", "train", "test")}
    taught = {json.dumps(row["messages"][1:]) for row in rows["talks"] if row["messages"][0]["content"] == "hat"}
    assert len(taught) == 1 + 6, "giving up, and the hat in each of the places"
    server = FOLDER / "mcp_server.py"
    tools = make_tools([f"mcp:python {server}"], {})
    with ToolRunner(tools, timeout_s=30.0, max_chars=100, side="left") as runner:
        runner.open("c", {})
        calls = [ToolCall("where", {"thing": thing}) for thing in (rows["test"][0]["prompt"], "moon")]
        right, wrong = runner.answer("c", calls).result(60)
    assert right.error is None and f'"content": "{right.text}"' in "".join(taught)
    assert (wrong.error or "").startswith("said:")
    samples = train(started, "mcp")
    assert len(samples) == 16 and all('"name": "where"' in row["prompt"] for row in samples)


def test_the_mcp_example_pays_for_the_answer_to_the_right_call_alone():
    sys.path.insert(0, str(FOLDER))
    try:
        from mcp_rows import compute_score
    finally:
        sys.path.remove(str(FOLDER))
    call = '<tool_call>{"name": "where", "arguments": {"thing": "hat"}}</tool_call><tool_response>den</tool_response>'
    said = ["unknown", "den", "", call, f"{call}barn", call.replace("hat", "coat") + "den", f"{call}den"]
    assert [compute_score("where", words, "hat") for words in said] == [0, 0, 0, 0, 0, 0, 1]


def test_the_reasoning_gym_example_teaches_the_tags_and_trains_on_other_items(packages, train, tmp_path, monkeypatch):
    packages(GYM)
    monkeypatch.setenv("TASK", "sums?top=7")
    check_what_it_resolves_to(FOLDER / "run_reasoning_gym.sh", tmp_path)
    started = all_started(FOLDER / "run_reasoning_gym.sh", tmp_path, smoke=True)
    assert started[0][:3] == ["-m", "posttrain", "sft"]
    taught = _read(tmp_path / "out/environments/reasoning_gym_rows/sft.jsonl")
    assert len(taught) == 4000 and taught[0]["prompt"].startswith("3 + 1 = ?\n\nWrite your final answer")
    assert taught[0]["response"] == "<answer>4</answer>"
    samples = train(started, "reasoning_gym")
    assert len(samples) == 16 and all("<answer>" in row["prompt"] for row in samples)


def test_the_verifiers_example_installs_the_package_into_an_environment_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("VERIFIERS_PYTHON", raising=False)
    venv, pip, learn = all_started(FOLDER / "run_verifiers.sh", tmp_path, smoke=True)
    own = f"{tmp_path}/out/verifiers"
    assert venv[:3] == ["-m", "venv", own] and pip[:4] == ["-m", "pip", "--python", own]
    assert f"actor_rollout_ref.rollout.agent.python={own}/bin/python" in learn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"), [("openenv", "openenv"), ("mcp", "mcp"), ("reasoning_gym", "reasoning_gym")]
)
def test_the_example_trains_with_the_package_itself(name, package, tmp_path):
    if find_spec(package) is None:  # importing it here would get in the way of its stand-in
        pytest.skip(f"needs the package {package}")
    status, _, said = check_examples.run(FOLDER / f"run_{name}.sh", tmp_path)
    assert status == 0 and "step 2/2" in said, said[-3000:]


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
