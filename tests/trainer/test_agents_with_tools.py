"""Runs whose agents use tools: by name, as the model calls them, and beside rows that the built-in agent leads."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import scripted
from agent_runs import AGENT, FILE, R, samples
from runs import metrics_of, run, settings

import posttrain
from posttrain.conversations.agents import register_agent
from posttrain.conversations.tools.registry import register_tool

TOOLS = {f"{R}multi_turn": True, f"{R}tools": ["add"], "data__max_prompt_length": 240, "data__max_response_length": 240}


def add(a: int, b: int, *, api_key: str = "") -> str:
    """The sum."""
    if b == 2:
        time.sleep(5)  # it is ended at its deadline
    return f"{a + b} {api_key}"


def called(a: int, b: int) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def test_an_agent_uses_the_runs_tools_by_name_with_their_deadlines_secrets_and_counts(tiny_model, sums, tmp_path):
    register_tool("add")(add)
    shown = []

    async def ask(chat, row):
        first = await chat.say()
        answer = await chat.call("add", a=1, b=int(first) % 3)
        shown.append(answer)
        chat.tell(answer, role="tool")
        await chat.say()
        return 1.0 + ("***" in answer)

    ask.isolated = False  # so that `shown` is seen here
    register_agent("guess")(ask)
    scripted.use(lambda read, seed: str(seed % 3))
    more = {f"{R}multi_turn__tool_timeout_s": 0.6, f"{R}tool_config__add__api_key": "sk-hidden", f"{R}n": 6}
    more |= {f"{R}agent__timeout_s": 0.5}
    result = run(tiny_model, sums, tmp_path, **AGENT | TOOLS | more)
    late = "The tool add gave no answer within 0.6 seconds."
    assert set(shown) == {"1 ***", "2 ***", late}, "a tool's time is not the agent's"
    rows = samples(result)
    for row in rows:
        (call,) = json.loads(row["tool_calls"])
        slow = call["arguments"]["b"] == 2
        assert call["answer"] in shown and (call["error"] is not None) == slow and call["turn"] == 1
        assert row["error"] is None and row["score"] == (1.0 if slow else 2.0) and row["num_turns"] == 2
        assert '"name": "add"' in row["prompt"], "the model is shown the tools"
    line = metrics_of(result.path)[0]
    errors = sum(json.loads(row["tool_calls"])[0]["error"] is not None for row in rows) / len(rows)
    assert line["tools/calls"] == 1 and line["tools/errors"] == pytest.approx(errors) and 0 < errors < 1


@pytest.mark.slow
def test_an_agent_has_the_models_own_calls_answered_as_the_built_in_one_does(tiny_model, sums, tmp_path):
    register_tool("add")(add)

    async def twice(chat, row):
        await chat.say()
        await chat.answer(chat.tool_calls())
        await chat.say()
        return float(chat.turns)

    register_agent("guess")(twice)
    script = lambda read, seed: "7" if "<tool_response>" in read else called(4, 1) + called(1, 1)  # noqa: E731
    scripted.use(script)
    given = AGENT | TOOLS | {"data__max_response_length": 400}
    by_agent = samples(run(tiny_model, sums, tmp_path / "a", **given))
    scripted.use(script)
    del given[f"{R}agent"]
    built_in = samples(run(tiny_model, sums, tmp_path / "b", **given))
    for mine, theirs in zip(by_agent, built_in, strict=True):
        for name in ("response_ids", "response_mask", "rollout_log_probs", "tool_calls", "policy_versions"):
            assert mine[name] == theirs[name], name
        assert mine["score"] == 2.0 and "Only 1 call(s) in a turn are answered" in mine["response"]


def test_rows_are_led_by_the_tool_agent_and_by_agents_of_a_file_in_one_run(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.py").write_text(FILE)
    (tmp_path / "agents.yaml").write_text("- {name: one, _target_: two.lead}\n")
    register_tool("add")(add)
    scripted.use(lambda read, seed: "7" if "<tool_response>" in read else called(4, 1))
    names = ["one", "tool_agent", "single_turn_agent", None]
    rows = [{"prompt": f"{n}?", "ground_truth": "7", "data_source": "math_reasoning"} for n in range(4)]
    rows = [row | ({"agent_name": name} if name else {}) for row, name in zip(rows, names, strict=True)]
    more = {f"{R}agent__agent_loop_config_path": "agents.yaml"}
    given = settings(tiny_model, {"train": Path()}, tmp_path, **AGENT | TOOLS | more)
    for key in ("data.train_files", "actor_rollout_ref.rollout.agent"):
        given.pop(key)
    found = samples(posttrain.train(given, data=rows))
    by_row = {row["data_row"]: (row["num_turns"], len(json.loads(row["tool_calls"]))) for row in found}
    assert by_row == {0: (1, 0), 1: (2, 1), 2: (1, 0), 3: (2, 1)}, "rows without a name have the built-in tool agent"
    assert {row["score"] for row in found if row["data_row"] == 0} == {1.0}
    assert len(found) == 12 and all(row["error"] is None for row in found)
