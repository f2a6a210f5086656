"""Loops that inherit from verl's ToolAgentLoop: their methods are called; the run's tools and interactions answer."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "trainer"))

import scripted
from runs import run, settings

import posttrain
from posttrain.conversations.agents import AGENTS
from posttrain.models.embedded import byte_tokenizer

R = "actor_rollout_ref__rollout__"
LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.tools.schemas import ToolResponse


@register("my_tool_agent")
class Mine(ToolAgentLoop):
    async def run(self, sampling_params, **kwargs) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        output.reward_score = 0.25 * output.extra_fields["called"] + sum(output.extra_fields["turn_scores"])
        return output

    async def _handle_generating_state(self, agent_data: AgentData, sampling_params, ignore_termination=False):
        agent_data.extra_fields.setdefault("called", 0)
        return await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)

    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        response, reward, metrics = await super()._call_tool(tool_call, tools_kwargs, agent_data)
        agent_data.extra_fields["called"] += 1
        return ToolResponse(text=f"[{response.text}]"), reward, metrics
"""
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "mine.py").write_text(LOOP)
    yield tmp_path
    AGENTS.clear()
    for name in ("mine", "scoring"):
        sys.modules.pop(name, None)


AGENT = {
    f"{R}name": "scripted",
    f"{R}agent__default_agent_loop": "my_tool_agent",
    f"{R}agent__processes": 2,
    "actor_rollout_ref__model__external_lib": "mine.py",
    f"{R}multi_turn__enable": True,
    f"{R}tools": ["calculator"],
    "data__max_prompt_length": 400,
    "data__max_response_length": 300,
}


def samples(result) -> list[dict]:
    return pq.read_table(Path(result.path) / "samples" / "step_1.parquet").to_pylist()


def test_a_subclass_answers_calls_by_the_run_s_tools_and_its_own_methods(tiny_model, sums, folder, capsys):
    scripted.use(lambda read, seed: "7" if "<tool_response>" in read else CALL)
    rows = samples(run(tiny_model, sums, folder / "out", **AGENT))
    assert "the ratio is 1 within" in capsys.readouterr().out
    tokenizer = byte_tokenizer()
    for row in rows:
        pairs = list(zip(row["response_ids"], row["response_mask"], strict=True))
        told = tokenizer.decode([one for one, own in pairs if not own])
        assert told == "<|user|><tool_response>[5]</tool_response><|end|><|assistant|>"
        assert (row["score"], row["num_turns"], row["finish_reason"], row["error"]) == (0.25, 2, "stop", None)
        assert [one["answer"] for one in json.loads(row["tool_calls"])] == ["5"], "the call is among the sample's"


@pytest.mark.slow
def test_turns_and_parallel_calls_have_verls_limits(tiny_model, sums, folder):
    scripted.use(lambda read, seed: CALL + CALL)
    more = {f"{R}multi_turn__max_user_turns": 1, f"{R}multi_turn__max_parallel_calls": 2}
    for row in samples(run(tiny_model, sums, folder / "out", **AGENT | more)):
        assert (row["num_turns"], row["score"]) == (2, 0.5) and row["response"].count("[5]") == 2


SINGLE = """
from verl.experimental.agent_loop import SingleTurnAgentLoop, register


@register("my_tool_agent")
class Mine(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.reward_score = float(len(output.response_ids))
        return output
"""


def test_a_loop_of_one_turn_can_be_inherited_from(tiny_model, sums, folder):
    scripted.use(lambda read, seed: "7")
    (folder / "mine.py").write_text(SINGLE)
    rows = samples(run(tiny_model, sums, folder / "out", **AGENT))
    assert {(row["num_turns"], row["score"], row["response"]) for row in rows} == {(1, 2.0, "7")}


SCORING = """
from verl.interactions.base import BaseInteraction


class Scoring(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        said = [one for one in messages if one["role"] == "assistant"]
        return len(said) == 3, "go on", 1.0, {"word": kwargs["word"]}
"""


@pytest.mark.slow
def test_interactions_answer_turns_without_calls_in_such_a_loop(tiny_model, folder):
    scripted.use(lambda read, seed: CALL if "go on" in read and "[5]" not in read else "7")
    (folder / "scoring.py").write_text(SCORING)
    (folder / "interactions.yaml").write_text("interaction: [{name: scoring, class_name: scoring.Scoring}]")
    kwargs = {"name": "scoring", "word": "hat"}
    rows = [{"prompt": f"{n}?", "extra_info": {"interaction_kwargs": kwargs}, "data_source": "x"} for n in range(4)]
    more = {f"{R}multi_turn__interaction_config_path": "interactions.yaml"}
    given = settings(tiny_model, {"train": Path()}, folder / "out", **AGENT | more)
    given.pop("data.train_files")
    for row in samples(posttrain.train(given, data=rows)):
        assert (row["num_turns"], row["score"]) == (3, 2.25), "two turns are scored, one calls the tool"


def test_parsers_are_those_of_posttrains_formats_or_registered_ones():
    from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

    @ToolParser.register("shouting")
    class Shouting(ToolParser):
        async def extract_tool_calls(self, responses_ids, tools=None):
            return "", [FunctionCall(name="shout", arguments="{}")]

    tokenizer = byte_tokenizer()
    ids = tokenizer(CALL + "<tool_call>no JSON</tool_call>")["input_ids"]
    text, calls = asyncio.run(ToolParser.get_tool_parser("hermes", tokenizer).extract_tool_calls(ids))
    assert text == ""  # calls are no words, nor is what was meant as one
    assert calls == [FunctionCall(name="calculator", arguments='{"expression": "2+3"}')]
    _, calls = asyncio.run(ToolParser.get_tool_parser("shouting", tokenizer).extract_tool_calls(ids))
    assert calls[0].name == "shout" and ToolParser.get_tool_parser("gpt-oss", tokenizer) is not None
    with pytest.raises(ValueError, match=r"Unknown tool parser: hermse; there are hermes, .*shouting, "):
        ToolParser.get_tool_parser("hermse", tokenizer)
    del ToolParser._registry["shouting"]
