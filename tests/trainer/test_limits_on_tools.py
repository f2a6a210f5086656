"""Limits on what the tools of a conversation may take in all: time and cost, each with its own finish reason."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import scripted
from runs import metrics_of, run

from posttrain.config import load_config
from posttrain.conversations.conversation import Conversation, Limits
from posttrain.conversations.tools.base import ToolAnswer
from posttrain.conversations.tools.hosts import read_answer
from posttrain.conversations.tools.registry import TOOLS as KNOWN
from posttrain.conversations.tools.registry import register_tool

M = "actor_rollout_ref__rollout__multi_turn__"
TOOLS = {
    "actor_rollout_ref__rollout__name": "scripted",
    f"{M}enable": True,
    f"{M}tools": ["paid"],
    f"{M}max_parallel_calls": 2,
    "data__max_prompt_length": 300,
    "data__max_response_length": 600,
    "trainer__total_training_steps": 1,
}
CALL = '<tool_call>{"name": "paid", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(autouse=True)
def paid():
    @register_tool("paid")
    def paid(a: int) -> str:
        """A search that says what it took."""
        return ToolAnswer("found", seconds=1.5, cost=0.25)  # pyright: ignore

    yield
    KNOWN.pop("paid", None)


def asks(calls: int, turns: int):
    return lambda read, seed: "done" if read.count("<tool_response>") >= calls * turns else CALL * calls


def samples(result) -> list[dict]:
    return pq.read_table(Path(result.path) / "samples" / "step_1.parquet").to_pylist()


@pytest.mark.parametrize(
    ("limit", "calls", "turns", "reason"),
    [
        pytest.param({"max_tool_seconds": 3.0}, 1, 2, "tool_time", marks=pytest.mark.slow),
        ({"max_tool_seconds": 3.0}, 2, 2, "tool_time"),  # calls of a turn run side by side
        ({"max_tool_cost": 0.5}, 1, 2, "tool_cost"),
        pytest.param({"max_tool_cost": 0.6}, 1, 3, "tool_cost", marks=pytest.mark.slow),
        pytest.param({"max_tool_cost": 0.5}, 2, 1, "tool_cost", marks=pytest.mark.slow),
        ({"max_tool_cost": 1.1, "max_tool_seconds": 5.9}, 1, 4, "tool_time"),
        pytest.param({"max_tool_cost": 1.1, "max_tool_seconds": 9.0}, 1, 4, "stop", marks=pytest.mark.slow),
    ],
)
def test_a_conversation_ends_when_its_tools_have_taken_as_much_as_they_may(
    tiny_model, sums, tmp_path, limit, calls, turns, reason
):
    scripted.use(asks(calls, 4))
    result = run(tiny_model, sums, tmp_path, **TOOLS, **{f"{M}{name}": value for name, value in limit.items()})
    for row in samples(result):
        assert (row["finish_reason"], len(json.loads(row["tool_calls"]))) == (reason, calls * turns)
        assert row["num_turns"] == turns + (reason == "stop")
        assert all(call["cost"] == 0.25 for call in json.loads(row["tool_calls"]))
        assert row["response_mask"][-1] == 1, "nothing is read that no turn follows"
    (line,) = [line for line in metrics_of(result.path, times=True) if line["step"] == 1]
    assert line["tools/cost"] == pytest.approx(0.25 * calls * turns)
    assert line["tools/time_limit"] == (reason == "tool_time") and line["tools/cost_limit"] == (reason == "tool_cost")


def test_without_limits_conversations_go_on_and_cost_is_counted(tiny_model, sums, tmp_path):
    scripted.use(asks(1, 3))
    result = run(tiny_model, sums, tmp_path, **TOOLS)
    assert {(row["finish_reason"], row["num_turns"]) for row in samples(result)} == {("stop", 4)}
    (line,) = [line for line in metrics_of(result.path) if line["step"] == 1]
    assert (line["tools/cost"], line["tools/cost_limit"], line["tools/time_limit"]) == (0.75, 0.0, 0.0)


BOARD = '''
from posttrain.conversations.tools.base import ToolAnswer


class Board:
    def reset(self, **row):
        self.reward = 0.0

    def look(self, place: str) -> str:
        """Looks at a place.

        Args:
            place: Its name
        """
        self.reward += 1.0
        return ToolAnswer("nothing", cost=0.5)
'''


def test_methods_of_an_environment_count_and_its_score_is_kept(tiny_model, sums, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paid_board.py").write_text(BOARD)
    scripted.use(lambda read, seed: CALL.replace("paid", "look").replace('"a": 1', '"place": "sea"'))
    given = {name: value for name, value in TOOLS.items() if not name.startswith(M)}
    given |= {"actor_rollout_ref__rollout__agent": "paid_board.py:Board", "data__max_prompt_length": 400}
    result = run(tiny_model, sums, tmp_path / "out", **given, **{f"{M}max_tool_cost": 1.0})
    assert {(row["finish_reason"], row["num_turns"], row["score"]) for row in samples(result)} == {
        ("tool_cost", 2, 2.0)
    }


def test_calls_side_by_side_take_as_long_as_the_longest():
    record = Conversation(("a", 0), [1], seed=0, how={})
    record.add_spent([ToolAnswer("x", seconds=2.0, cost=1.0), ToolAnswer("y", seconds=3.0, cost=2.0)])
    record.add_spent([])
    record.add_spent([ToolAnswer("z", seconds=0.5)])
    assert (record.tool_seconds, record.tool_cost) == (3.5, 3.0)
    assert record.spent(Limits(1, 1)) == record.spent(Limits(1, 1, None, 3.6, 3.1)) == ""
    assert (
        record.spent(Limits(1, 1, None, 3.5)) == "tool_time"
        and record.spent(Limits(1, 1, None, None, 3.0)) == "tool_cost"
    )


@pytest.mark.parametrize("cost", [-0.1, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_an_error_of_the_tool(cost):
    with pytest.raises(ValueError, match="its cost is"):
        read_answer("paid", ToolAnswer("x", cost=cost), 0.0)


def test_limits_that_no_call_can_reach_are_noted():
    program = "actor_rollout_ref.rollout.agent.program=python agent.py"
    found = load_config([program, "actor_rollout_ref.rollout.multi_turn.max_tool_cost=2"])
    assert any("max_tool_cost has no effect: a program calls its own tools" in note for note in found.notes)
    found = load_config(["actor_rollout_ref.rollout.multi_turn.max_tool_cost=2"])
    assert any("max_tool_cost has no effect: " in note for note in found.notes)


@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_is_positive(value):
    for name in ("max_tool_cost", "max_tool_seconds"):
        with pytest.raises(Exception, match=name):
            load_config([f"actor_rollout_ref.rollout.multi_turn.{name}={value}"])
