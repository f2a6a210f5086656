"""Tools written for verl, given by a YAML file in verl's form, are called as verl calls them."""

from __future__ import annotations

import sys

import pytest

from posttrain.conversations.tools.base import ToolAnswer, ToolCall
from posttrain.conversations.tools.registry import make_tools
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.errors import UserError

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
        ("tools: [{class_name: my_verl_tools.Judge, config: {type: mcp}}]", "only `native` tools are run here"),
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
