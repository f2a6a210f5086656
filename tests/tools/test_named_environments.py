"""Environments, tools and rows by name, with small stand-ins for the packages."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from posttrain.conversations.agents import Agents
from posttrain.conversations.environments import play
from posttrain.conversations.settings import AgentSettings, TurnSettings
from posttrain.conversations.tools.base import ToolCall
from posttrain.conversations.tools.registry import make_tools
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.data.rows import load_rows
from posttrain.errors import UserError
from posttrain.rewards.scorers import score_by_source
from tests.tools.fake_mcp import SESSION

GYM = """
class Config:
    def __init__(self, size=500, seed=None, top=3): ...


class Sums:
    def __init__(self, size=500, seed=None, top=3):
        self.size, self.seed, self.top = size, seed, top

    def __getitem__(self, number):
        a = (self.seed + number) % self.top
        return {"question": f"{a} + 1 = ?", "answer": str(a + 1)}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.1 if answer else 0.0


DATASETS = {"sums": (Sums, Config)}


class Curriculum:
    attributes = {"top": None}
    top = 3

    def increment_attr_level(self, name):
        self.top += 10

    def generate_configuration(self):
        made = Config()
        made.size, made.seed, made.top = 500, None, self.top
        return made


def create_curriculum(name):
    return Curriculum()
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Writes modules into a folder that this process and those that it starts import from."""
    folder = tmp_path / "packages"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in path.parents:
                if parent != folder and folder in parent.parents and not (parent / "__init__.py").exists():
                    (parent / "__init__.py").write_text("")
            path.write_text(text)

    return write


def test_rows_of_reasoning_gym_come_with_what_their_task_needs_to_score_them(packages):
    packages(
        {
            "reasoning_gym/factory.py": GYM,
            "reasoning_gym/utils.py": "import re\n\n\ndef extract_answer(text):\n"
            "    found = re.findall('<answer>(.*?)</answer>', text)\n    return found[-1] if found else None\n",
            "reasoning_gym/__init__.py": "from reasoning_gym.factory import DATASETS\n\n\n"
            "def create_dataset(name, **given):\n    return DATASETS[name][0](**given)\n",
        }
    )
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


OPENENV = """
class Result:
    def __init__(self, observation, reward, done):
        self.observation, self.reward, self.done = observation, reward, done


class GenericEnvClient:
    def __init__(self, base_url):
        self.base_url = base_url

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.base_url = "closed"

    async def reset(self, seed):
        self.seed = seed
        return Result({"text": f"seed {seed}", "metadata": {}}, None, False)

    async def step(self, action):
        if action["n"] < 0:
            raise RuntimeError("Invalid message (code: VALIDATION_ERROR)")
        return Result({"text": "more"}, 0.5, action["n"] == self.seed)
"""


class Schema(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"action": {"properties": {"n": {"type": "integer"}, "metadata": {}}}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


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


def test_an_openenv_server_is_played_over_its_address_and_wrong_actions_are_told(packages):
    packages({"openenv/core.py": OPENENV})
    server = HTTPServer(("127.0.0.1", 0), Schema)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    name = f"openenv:http://127.0.0.1:{server.server_port}"
    try:
        agent = Agents(AgentSettings(path=name), TurnSettings(), {}).agent(name)
        chat = FakeChat("3", "what?", "-1", "7")
        assert asyncio.run(agent.lead(chat, {})) == 1.0
    finally:
        server.shutdown()
        server.server_close()
    wrong = "This is no action. It has: n (integer)."
    assert chat.told == ["seed 7", "more", wrong, wrong]
    with pytest.raises(UserError, match="no OpenEnv server answers at"):
        Agents(AgentSettings(path=name), TurnSettings(), {})
    with pytest.raises(UserError, match="has no address"):
        Agents(AgentSettings(path="openenv:here"), TurnSettings(), {})


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
