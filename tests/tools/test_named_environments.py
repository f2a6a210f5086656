"""Environments, tools and rows by name, with small stand-ins for the packages."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys

import pytest

from posttrain.conversations import adapters
from posttrain.conversations.agents import Agents
from posttrain.conversations.conversation import ChatError
from posttrain.conversations.environments import play
from posttrain.conversations.settings import AgentSettings, TurnSettings
from posttrain.conversations.tools import try_command
from posttrain.conversations.tools.base import ToolCall
from posttrain.conversations.tools.registry import make_tools
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.data.rows import load_rows
from posttrain.errors import UserError
from posttrain.rewards.scorers import score_by_source
from tests.tools.fake_mcp import SESSION
from tests.tools.fake_packages import GYM, OPENENV


def test_rows_of_reasoning_gym_come_with_what_their_task_needs_to_score_them(packages):
    packages(GYM)
    table = load_rows("reasoning_gym:sums?size=5&top=7")
    assert len(table) == 5 and table.rows[3]["prompt"].startswith("3 + 1 = ?\n\nWrite your final answer between")
    row = table.rows[3]
    for text, expected in ((f"<answer>{row['ground_truth']}</answer>", 1.0), ("<answer>9</answer>", 0.1), ("4", 0.0)):
        assert score_by_source(row["data_source"], text, row["ground_truth"], row)["score"] == expected
    assert load_rows("reasoning_gym:sums?level=2&size=30").rows[20]["prompt"].startswith("20 + 1"), "top is 3 + 2 * 10"
    assert len(load_rows("reasoning_gym:sums", limit=4)) == 4
    seeds = [
        json.loads(load_rows("reasoning_gym:sums?size=1", setting=f"data.{split}_files").rows[0]["task_settings"])
        for split in ("train", "val")
    ]
    assert seeds[0]["seed"] != seeds[1]["seed"], "validation has other items"
    for wrong, words in (
        ("sum", "there is no task sum. Did you mean sums?"),
        ("sums?topp=1", "has no setting topp. Did you mean top?"),
        ("sums?size=0", "size is 0"),
        ("sums?size", "is not KEY=VALUE"),
    ):
        with pytest.raises(UserError) as error:
            load_rows(f"reasoning_gym:{wrong}")
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "extra"),
    [("rows", "posttrain[reasoning-gym]"), ("environment", "posttrain[openenv]"), ("tools", "posttrain[mcp]")],
)
def test_a_missing_package_is_one_error_with_the_extra_that_installs_it(monkeypatch, name, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(UserError) as error:
        if name == "rows":
            load_rows("reasoning_gym:leg_counting")
        elif name == "environment":
            Agents(AgentSettings(path="openenv:http://127.0.0.1:1"), TurnSettings(), {})
        else:
            make_tools(["mcp:python server.py"], {})
    assert extra in str(error.value)


STDIO_SERVER = """
class StdioServerParameters:
    def __init__(self, command, args, env):
        self.command, self.args = command, args

"""
MCP = (
    STDIO_SERVER
    + SESSION
    + """
    async def list_tools(self):
        tool = type("T", (), {"name": "where", "description": "Finds.", SCHEMA: {"properties": {"thing": {}}}})
        return type("R", (), {"tools": [tool]})

    async def call_tool(self, name, arguments):
        part = type("P", (), {"type": "text", "text": f"{self.server} {arguments['thing']}"})
        return type("R", (), {"content": [part], ERROR: arguments["thing"] == "nothing"})
"""
)


@pytest.mark.parametrize(("schema", "error"), [("inputSchema", "isError"), ("input_schema", "is_error")])
def test_tools_of_an_mcp_server_are_listed_and_called_in_both_versions_of_the_package(packages, schema, error):
    names = f"SCHEMA, ERROR = {schema!r}, {error!r}\n"
    connect = "import contextlib\n\n\n@contextlib.asynccontextmanager\nasync def {}(server, **_):\n"
    stdio = connect.format("stdio_client") + "    yield ' '.join([server.command, *server.args]), None\n"
    http = connect.format("streamable_http_client") + "    yield server, None, None\n"
    packages({"mcp/client/stdio.py": stdio, "mcp/client/streamable_http.py": http, "mcp/__init__.py": names + MCP})
    for server in ("python server.py", "http://127.0.0.1:9/mcp"):
        tools = make_tools([f"mcp:{server}"], {})
        assert tools["where"].schema["function"] == {
            "name": "where",
            "description": "Finds.",
            "parameters": {"properties": {"thing": {}}},
        }
        with ToolRunner(tools, timeout_s=30.0, max_chars=100, side="left") as runner:
            runner.open("c", {})
            calls = [ToolCall("where", {"thing": thing}) for thing in ("hat", "nothing")]
            right, wrong = runner.answer("c", calls).result(60)
        assert right.text == f"{server} hat" and right.error is None
        assert wrong.text == f"{server} nothing" and (wrong.error or "").startswith("said:")
    with pytest.raises(UserError, match="the MCP server broken cannot be reached: ConnectionError: nobody is there"):
        make_tools(["mcp:broken"], {})
    for command, words in (("mcp: ", "name no MCP server"), ("mcp:python 'server.py", "No closing quotation")):
        with pytest.raises(UserError, match=words):
            make_tools([command], {})


def test_what_an_mcp_server_wrote_before_it_ended_is_in_the_error_without_secrets(packages, tmp_path):
    stdio = """
import contextlib
import subprocess
import sys


@contextlib.asynccontextmanager
async def stdio_client(server, errlog):
    subprocess.run([server.command, *server.args], stderr=errlog, env=server.env)
    yield "broken", None
"""
    client = MCP.replace(
        "self.command, self.args = command, args", "self.command, self.args, self.env = command, args, env"
    )
    packages({"mcp/client/stdio.py": stdio, "mcp/__init__.py": 'SCHEMA = "s"\n' + client})
    (tmp_path / "server.py").write_text("import os\nraise RuntimeError('no account ' + os.environ['ACCOUNT_KEY'])\n")
    entry = {"command": sys.executable, "args": [str(tmp_path / "server.py")], "env": {"ACCOUNT_KEY": "s3cr3t"}}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"accounts": entry}}))
    with pytest.raises(UserError) as error:
        make_tools([], {}, mcp_path=str(tmp_path / "servers.json"))
    assert "accounts cannot be reached: ConnectionError: nobody is there" in str(error.value)
    assert "\n  it wrote:  RuntimeError: no account ***\n" in str(error.value) and "s3cr3t" not in str(error.value)


def test_a_tool_of_an_mcp_server_is_tried_outside_a_run(packages, capsys):
    stdio = "import contextlib\n\n\n@contextlib.asynccontextmanager\nasync def stdio_client(server, **_):\n"
    stdio += "    yield 'boxes', None\n"
    two = MCP.replace('{"tools": [tool]}', '{"tools": [tool, type("U", (tool,), {"name": "when"})][:COUNT]}')
    names = "SCHEMA, ERROR = 'input_schema', 'is_error'\n"
    packages({"mcp/client/stdio.py": stdio, "mcp/__init__.py": f"COUNT = 1\n{names}{two}"})
    assert try_command.main(["mcp:python server.py", '{"thing": "hat"}']) == 0
    assert "<tool_response>\nboxes hat\n</tool_response>" in capsys.readouterr().out
    packages({"mcp/__init__.py": f"COUNT = 2  # of another length: Python compares size and second\n{names}{two}"})
    with pytest.raises(UserError, match=r"several tools.*\n.*--tool where \| when"):
        try_command.main(["mcp:python server.py", '{"thing": "hat"}'])
    assert try_command.main(["mcp:python server.py", '{"thing": "hat"}', "--tool", "when"]) == 0
    assert '"name": "when"' in capsys.readouterr().out


@pytest.fixture
def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class FakeChat:
    """A chat whose model says these turns."""

    over, seed, tools, messages = False, 7, (), ()

    def __init__(self, *turns):
        self.turns, self.told, self.facts, self.last, self.rewards = list(turns), [], {}, None, []
        self.add_reward = self.rewards.append

    async def say(self, stop=()):
        self.last = self
        return self.turns.pop(0)

    def start(self, messages, tools):
        self.told.append(messages[0]["content"])

    def tell(self, text, role="user"):
        self.told.append(text)


def test_an_openenv_server_is_played_over_its_address_and_wrong_actions_are_told(packages, serve_schema):
    packages(OPENENV)
    name, handler = serve_schema()
    agent = Agents(AgentSettings(path=name), TurnSettings(), {}).agent(name)
    chat = FakeChat("3", "what?", "-1", "7")
    assert asyncio.run(agent.lead(chat, {})) == 1.0
    wrong = "This is no action. It has: n (integer)."
    assert chat.told == ["seed 7", "more", wrong, wrong]
    assert handler.asked == 1, "a thousand conversations do not ask a thousand times what an action is"


def test_a_session_that_the_openenv_server_has_no_room_for_says_how_many_it_must_allow(packages, serve_schema):
    packages(OPENENV)
    name, _ = serve_schema()
    chat = FakeChat("3")
    chat.seed = 13
    with pytest.raises(
        ChatError, match=r"max_concurrent_envs .* below data.train_batch_size times rollout.n: .*8 of 8 sessions active"
    ):
        asyncio.run(Agents(AgentSettings(path=name), TurnSettings(), {}).agent(name).lead(chat, {}))


def test_an_error_of_the_openenv_server_says_where_it_was(packages, serve_schema):
    packages(OPENENV)
    name, _ = serve_schema()
    with pytest.raises(ChatError, match=r"step failed in the OpenEnv server at http://.*: Server error: 'board'"):
        asyncio.run(Agents(AgentSettings(path=name), TurnSettings(), {}).agent(name).lead(FakeChat("99"), {}))


def test_an_openenv_server_that_is_being_started_is_waited_for(packages, serve_schema, free_port):
    packages(OPENENV)
    said = []

    def say(text):
        said.append(text)
        serve_schema(port=free_port)

    name = f"openenv:http://127.0.0.1:{free_port}"
    Agents(AgentSettings(path=name), TurnSettings(), {"say": say})
    assert said == [f"Waiting up to 30 seconds for an OpenEnv server at http://127.0.0.1:{free_port}"]


def test_an_openenv_server_that_is_down_elsewhere_or_another_is_an_error(
    packages, serve_schema, free_port, monkeypatch
):
    packages(OPENENV)
    monkeypatch.setattr(adapters, "_START_S", 0.0)
    other, _ = serve_schema({"detail": "Not Found"})
    for name, words in (
        (f"openenv:http://127.0.0.1:{free_port}", "no OpenEnv server answers at .*refused"),
        (other, "no OpenEnv server answers at .*/schema does not describe an action"),
        ("openenv:here", "has no address"),
    ):
        with pytest.raises(UserError, match=words):
            Agents(AgentSettings(path=name), TurnSettings(), {})


def test_a_field_that_the_openenv_server_does_not_have_is_an_error_with_those_that_it_has(packages, serve_schema):
    packages(OPENENV)
    name, _ = serve_schema()
    Agents(AgentSettings(path=name, config={"action_field": "n", "observation_field": "text"}), TurnSettings(), {})
    for key, field, words in (
        ("action_field", "m", "the action of http.* has no such field.* It has: n."),
        ("observation_field", "texts", "observation of http.* has no such field. Did you mean text?"),
    ):
        with pytest.raises(UserError) as error:
            Agents(AgentSettings(path=name, config={key: field}), TurnSettings(), {})
        assert re.search(words, str(error.value)) and f"agent.config.{key}={field}" in str(error.value)


class Board:
    """In Gymnasium's form."""

    def __init__(self, limit: int = 9):
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return f"seed {seed} of {options['index']}", {"began": True}

    def step(self, action):
        self.count += 1
        return "go on", 0.25, action == "end", self.count == self.limit, {"count": self.count}


@pytest.mark.parametrize(("limit", "turns", "reward"), [(9, ["a", "end"], 0.5), (3, ["a", "b", "c"], 0.75)])
def test_an_environment_in_gymnasiums_form_ends_when_it_is_terminated_or_truncated(limit, turns, reward):
    chat = FakeChat(*turns)
    assert asyncio.run(play(Board, "board", {"limit": limit})(chat, {"index": 4})) == reward
    assert chat.facts == {"began": True, "count": len(turns)} and chat.told[0] == "seed 7 of 4" and not chat.turns
