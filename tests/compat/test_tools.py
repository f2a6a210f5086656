"""Tools written for verl, given by a YAML file in verl's form, are called as verl calls them."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "trainer"))

import scripted
from runs import run

from posttrain.conversations.settings import TurnSettings
from posttrain.conversations.tools.base import ToolAnswer, ToolCall
from posttrain.conversations.tools.registry import make_tools, make_tools_of
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.errors import UserError
from tests.tools.fake_mcp import SESSION

CLASSES = '''
import json
from uuid import uuid4
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

class Judge(BaseTool):
    """As verl's own example: keeps an answer for each conversation, and rewards what is better than before."""
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.instances = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        ground_truth = ground_truth or kwargs["create_kwargs"]["truth"]
        self.instances[instance_id] = {"truth": ground_truth, "answer": None}
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.instances[instance_id]["answer"] = parameters["answer"]
        reward = await self.calc_reward(instance_id)
        text = f"{self.config['greeting']} {reward} {self.config.get('api_key')}"
        return ToolResponse(text=text), reward / 2, {"right": reward, "words": "none"}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.instances[instance_id]["answer"] == self.instances[instance_id]["truth"])

    async def release(self, instance_id, **kwargs):
        del self.instances[instance_id]

class Old(BaseTool):
    """Of early versions: parameters are text, answers are text, it brings its schema itself."""
    def get_openai_tool_schema(self):
        function = {"name": "old", "description": "d", "parameters": {"properties": {"x": {"type": "integer"}}}}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(self, instance_id, **kwargs):
        return instance_id

    async def execute(self, instance_id: str, parameters: str, **kwargs):
        return str(json.loads(parameters)["x"] + self.config.get("more", 0)), 0.0, {}

class Picture(Old):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="Look:", image=["a", "b"]), None, None

class Failing(Old):
    def __init__(self, config, tool_schema):
        raise ValueError(f"the key {config['api_key']} is old")

class NoTool:
    pass
'''
YAML = """
tools:
  - class_name: my_verl_tools.Judge
    config: {type: native, greeting: "${oc.env:VERL_TOOL_GREETING}", api_key: hush-1}
    tool_schema:
      type: function
      function:
        name: judge
        description: Says whether an answer is right.
        parameters:
          type: object
          properties: {answer: {type: string, description: The answer}}
          required: [answer]
  - class_name: my_verl_tools.Old
    config: {type: native}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_verl_tools.py").write_text(CLASSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("VERL_TOOL_GREETING", "hello")
    yield tmp_path
    sys.modules.pop("my_verl_tools", None)
    from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY

    FUNCTION_TOOL_REGISTRY.clear()


def written(folder, text: str) -> str:
    (folder / "tools.yaml").write_text(text)
    return str(folder / "tools.yaml")


def test_tools_of_a_file_are_created_executed_rewarded_and_released(folder):
    tools = make_tools(["calculator", "judge"], {"old": {"more": 10}}, config_path=written(folder, YAML))
    assert list(tools) == ["judge", "old", "calculator"]
    assert tools["judge"].schema["function"]["parameters"]["required"] == ["answer"]
    tools["judge"].isolated = False  # so that its instances are seen here
    with ToolRunner(tools, timeout_s=20, max_chars=1000, side="left") as runner:
        runner.open("c", {"judge": {"ground_truth": "5"}})
        runner.open("d", {"judge": {"truth": "6"}})
        calls = [ToolCall("judge", {"answer": 5}), ToolCall("old", {"x": 3})]
        seen = {conversation: runner.answer(conversation, calls).result() for conversation in "cd"}
        assert [answer.text for answer in seen["c"]] == ["hello 1.0 ***", "13"], (
            "no key is shown, settings are laid over"
        )
        assert (seen["c"][0].reward, seen["c"][0].metrics) == (0.5, {"right": 1.0})
        assert seen["d"][0].text.startswith("hello 0.0")
        assert [runner.reward(conversation) for conversation in "cd"] == [1.0, 0.0]
        assert len(tools["judge"]._inner.instances) == 2
        runner.close_conversation("c")
    assert tools["judge"]._inner.instances == {}
    assert runner.counts.troubles() == []


def test_pictures_are_named_and_left_out(folder):
    tools = make_tools([], {}, config_path=written(folder, "tools: [{class_name: my_verl_tools.Picture}]"))
    with ToolRunner(tools, timeout_s=20, max_chars=1000, side="left") as runner:
        (answer,) = runner.answer("c", [ToolCall("old", {"x": 3})]).result()
    assert answer == ToolAnswer("Look:\n[2 images left out]", seconds=answer.seconds)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read: No such file"),
        ("tools: [", "is no YAML"),
        ("- a", "has no list `tools`"),
        ("tools: []", "has no list `tools`"),
        ("tools: [{config: {}}]", r"tools\[0\] of .* has no class_name"),
        ("tools: [{class_name: my_verl_tools.Judge, config: {type: mcp}}]", "Judge is not run for MCP servers"),
        ("tools: [{class_name: my_verl_tools.Judge, config: {type: x}}]", "tools are `native` or `mcp`"),
        ("tools: [{class_name: my_verl_tools.Judge, tool_schema: {}}]", "the tool_schema of .* is none"),
        ("tools: [{class_name: my_verl_tools.NoTool}]", "it has no `async def create`"),
        ("tools: [{class_name: my_verl_tools.Nothing}]", "has no function 'Nothing'"),
        ("tools: [{class_name: my_verl_tools.Failing, config: {api_key: hush-1}}]", r"the key \*\*\* is old"),
        ("tools: [{class_name: my_verl_tools.Judge, config: {a: '${oc.env:NO_SUCH_THING}'}}]", "NO_SUCH_THING"),
        ("tools: [{class_name: my_verl_tools.Old}, {class_name: my_verl_tools.Old}]", "two tools of .* are called old"),
        ("tools: [{class_name: verl.tools.search_tool.SearchTool}]", r'tools=\["search"\] has the same here'),
    ],
)
def test_a_file_that_cannot_be_used_is_said_in_words(folder, text, why):
    path = written(folder, text) if text is not None else str(folder / "gone.yaml")
    with pytest.raises(UserError, match=why) as caught:
        make_tools([], {}, config_path=path)
    assert "hush" not in str(caught.value)


FUNCTIONS = '''
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool
def double(number: int) -> str:
    """Doubles a number.

    Args:
        number: The number.
    """
    return str(2 * number)


@function_tool("praise")
async def judged(word: str):
    """Praises a word.

    Args:
        word: Any word.
    """
    return ToolResponse(text=f"{word}!"), 0.25, {"length": len(word)}


def helper(number: int) -> int:
    """No tool."""
    return number
'''


def test_functions_of_a_file_are_tools_with_rewards_and_other_functions_are_none(folder):
    (folder / "functions.py").write_text(FUNCTIONS)
    tools = make_tools(["calculator"], {}, function_path="functions.py")
    assert list(tools) == ["double", "praise", "calculator"]
    assert tools["double"].schema["function"]["parameters"]["required"] == ["number"]
    with ToolRunner(tools, timeout_s=20, max_chars=1000, side="left") as runner:
        runner.open("c", {})
        calls = [ToolCall("double", {"number": "21"}), ToolCall("praise", {"word": "hat"}), ToolCall("double", {})]
        first, second, wrong = runner.answer("c", calls).result()
    assert (first.text, first.reward, second.text, second.reward) == ("42", 0.0, "hat!", 0.25)
    assert second.metrics == {"length": 3.0} and (wrong.error or "").startswith("arguments:")


def test_a_run_gives_the_model_the_functions_of_its_file(tiny_model, sums, folder):
    """By verl's spelling of the key, too."""
    (folder / "functions.py").write_text(FUNCTIONS)
    call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    scripted.use(lambda read, seed: "done" if "<tool_response>" in read else call)
    more = {
        "data__max_prompt_length": 700,
        "data__max_response_length": 200,
        "data__function_tool_path": "functions.py",
    }
    rollout = {"actor_rollout_ref__rollout__name": "scripted", "actor_rollout_ref__rollout__multi_turn": True}
    result = run(tiny_model, sums, folder / "out", **more, **rollout)
    rows = pq.read_table(Path(result.path) / "samples" / "step_1.parquet").to_pylist()
    assert {row["num_turns"] for row in rows} == {2}
    assert all("<tool_response>42</tool_response>" in row["response"] for row in rows)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"function_tool_path=none\.py: no such file"),
        ("x = 1\n", r"registers no tool\.\n  to do:  write @function_tool above its functions"),
        ("1 / 0\n", "cannot be loaded: ZeroDivisionError"),
    ],
)
def test_a_file_of_functions_that_has_none_is_refused(folder, text, words):
    name = "none.py" if text is None else f"wrong_{len(text)}.py"
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(UserError, match=words):
        make_tools([], {}, function_path=name)


STDIO_SERVER = """
class StdioServerParameters:
    def __init__(self, command, args, env):
        self.text = f"{command} {' '.join(args)} {env.get('SHELF', '')}"

"""
MCP = (
    STDIO_SERVER
    + SESSION
    + """
    async def list_tools(self):
        names = ["look", "take"] if "stdio" in self.server else ["search"]
        made = [type("T", (), {"name": name, "description": "D.", "input_schema": {}}) for name in names]
        return type("R", (), {"tools": made})

    async def call_tool(self, name, arguments):
        return type("R", (), {"content": [type("P", (), {"type": "text", "text": self.server})], "is_error": False})
"""
)
STDIO = """
import contextlib


@contextlib.asynccontextmanager
async def stdio_client(server, errlog):
    yield f"stdio {server.text}", None
"""
HTTP = """
import contextlib


def create_mcp_http_client(headers):
    return contextlib.nullcontext(headers)


@contextlib.asynccontextmanager
async def streamable_http_client(url, http_client=None):
    yield f"{url} {http_client}", None, None
"""


@pytest.fixture
def servers(folder, monkeypatch):
    """The package mcp, and a file of two servers."""
    import os

    for name, text in {
        "__init__": MCP,
        "client/__init__": "",
        "client/stdio": STDIO,
        "client/streamable_http": HTTP,
    }.items():
        path = folder / "mcp" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    local = '{"command": "serve", "args": ["--all", "now"], "env": {"SHELF": "top"}}'
    remote = '{"url": "http://127.0.0.1:9/mcp", "auth_token": "hush-2"}'
    (folder / "mcp.json").write_text(f'{{"mcpServers": {{"local": {local}, "remote": {remote}}}}}')
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "mcp"]:
        del sys.modules[name]


def test_all_tools_of_a_file_of_mcp_servers_are_given_with_their_environment_and_token(servers):
    tools = make_tools_of(TurnSettings(enable=True, mcp_config_path="mcp.json"))
    assert list(tools) == ["look", "take", "search"]
    with ToolRunner(tools, timeout_s=30, max_chars=1000, side="left") as runner:
        runner.open("c", {})
        look, search = runner.answer("c", [ToolCall("look", {}), ToolCall("search", {})]).result()
    assert look.text == "stdio serve --all now ***", "variables may be secrets"
    assert search.text == "http://127.0.0.1:9/mcp {'Authorization': '***'}", "the token is sent, and not shown"


def test_an_entry_of_type_mcp_gives_the_tools_that_it_selects(servers):
    entry = """tools:
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {type: mcp, rate_limit: 120}
    mcp: {mcp_servers_config_path: mcp.json, tool_selected_list: [take, CHOSEN]}
"""
    tools = make_tools([], {}, config_path=written(servers, entry.replace("CHOSEN", "search")))
    assert list(tools) == ["take", "search"]
    assert tools["take"].note.startswith("rate_limit of tools[0] of ") and "have no effect" in tools["take"].note
    for old, new, words in (
        ("CHOSEN", "sarch", "its servers have no tool sarch"),
        ("MCPSearchTool", "MyTool", "MyTool is not run for MCP servers"),
        ("mcp_servers_config_path: mcp.json, ", "", r"has no mcp\.mcp_servers_config_path"),
    ):
        with pytest.raises(UserError, match=words):
            make_tools([], {}, config_path=written(servers, entry.replace(old, new)))


@pytest.mark.parametrize("text", ["{}", "[]", '{"mcpServers": {"a": {}}}', "no JSON"])
def test_a_file_of_mcp_servers_of_another_form_is_refused(folder, text):
    (folder / "mcp.json").write_text(text)
    with pytest.raises(UserError, match=r"the file of MCP servers mcp\.json is not of the form"):
        make_tools([], {}, mcp_path="mcp.json")
    with pytest.raises(UserError, match=r"mcp2\.json cannot be read"):
        make_tools([], {}, mcp_path="mcp2.json")
