"""Environments in runs: with the run's tools, with limits on turns, and TRL's, whose methods are the tools."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import scripted
from runs import run, settings

import posttrain
from posttrain.conversations.environments import MethodEpisode
from posttrain.conversations.settings import TurnSettings
from posttrain.conversations.tools.base import ToolCall
from posttrain.errors import UserError

R = "actor_rollout_ref__rollout__"
BASE = {f"{R}name": "scripted", "data__max_prompt_length": 400, "data__max_response_length": 400}
GUESS = """
class Guess:
    takes_messages = TAKES

    def reset(self, row, seed):
        return "Guess."

    def step(self, action):
        self.seen = " ".join(one["role"] for one in action) if self.takes_messages else action
        return "again", 0.25, False, {"seen": self.seen}
"""
BOARD = '''
class Board:
    def __init__(self):
        self.reward, self.looked, self._secret = 0.0, [], object()

    def reset(self, ground_truth=None, **kwargs):
        self.place = "cave" if ground_truth is not None else None
        return " Find the treasure."

    def look(self, place: str) -> str:
        """Looks at a place.

        Args:
            place: Its name
        """
        if place == "sea":
            raise ValueError("Too wet.")
        self.looked.append(place)
        self.reward = float(place == self.place)
        return "Gold!" if self.reward else "Nothing."

    def _hidden(self):
        pass
'''


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def samples(result) -> list[dict]:
    return pq.read_table(Path(result.path) / "samples" / "step_1.parquet").to_pylist()


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return f"{name}.py"

    yield write
    for name in [name for name in sys.modules if name.endswith(tuple(f"_{one}" for one in names) or ("?",))]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_runs_tools_answer_first_and_turns_end_at_their_limit(tiny_model, sums, tmp_path, write):
    scripted.use(lambda read, seed: "done" if "<tool_response>" in read else call("calculator", expression="2+3"))
    file = write("guess_with_tools", GUESS.replace("TAKES", "True"))
    more = {f"{R}tools": ["calculator"], f"{R}multi_turn": True, f"{R}max_turns": 3}
    given = {f"{R}agent": f"{file}:Guess", "trainer__total_training_steps": 1}
    rows = samples(run(tiny_model, sums, tmp_path / "out", **BASE | more | given))
    for row in rows:
        assert (row["num_turns"], row["finish_reason"], row["score"]) == (3, "turns", 0.5)
        assert row["turn_rewards"] == "[[1, 0.25], [2, 0.25]]", "the turn with the call has none, the last has one"
        assert row["response"].count("again") == 1 and row["response"].count("<tool_response>5") == 1


def test_a_limit_on_turns_holds_without_tools(tiny_model, sums, tmp_path, write, capsys):
    scripted.use(lambda read, seed: "9")
    file = write("guess_alone", GUESS.replace("TAKES", "False"))
    rows = samples(
        run(tiny_model, sums, tmp_path / "out", **BASE, **{f"{R}agent": f"{file}:Guess", f"{R}max_turns": 2})
    )
    assert "have no effect" not in capsys.readouterr().out
    assert {(row["num_turns"], row["finish_reason"], row["score"]) for row in rows} == {(2, "turns", 0.5)}


def test_an_environment_whose_methods_are_tools_is_played_as_in_trl(tiny_model, sums, tmp_path, write, capsys):
    def says(read: str, seed: int) -> str:
        if "Gold!" in read:
            return "found"
        return call("look", place="cave" if "Too wet." in read else "sea")

    scripted.use(says)
    result = run(tiny_model, sums, tmp_path / "out", **BASE, **{f"{R}agent": f"{write('board', BOARD)}:Board"})
    said = capsys.readouterr().out
    assert "Tools: look; a response has any number of turns." in said and "the ratio is 1 within" in said
    for row in samples(result):
        assert (
            '"name": "look"' in row["prompt"]
            and "_hidden" not in row["prompt"]
            and "Find the treasure." in row["prompt"]
        )
        assert (row["score"], row["num_turns"], row["finish_reason"]) == (1.0, 3, "stop")
        calls = json.loads(row["tool_calls"])
        assert [one["answer"] for one in calls] == ["The tool look failed: ValueError: Too wet.", "Gold!"]
        assert calls[0]["error"] == "raised: ValueError: Too wet."


@pytest.mark.parametrize(
    ("side", "begins", "ends"), [("left", True, False), ("middle", True, True), ("right", False, True)]
)
def test_what_a_method_says_is_cut_to_the_length_and_on_the_side_that_are_set(side, begins, ends):
    class Book:
        def reset(self, **row):
            pass

        def read(self) -> str:
            """Reads a page."""
            return "begin" + "." * 90 + "end"

    async def at_once(method, **arguments):
        return method(**arguments)

    turns = TurnSettings(max_tool_response_length=40, tool_response_truncate_side=side)
    chat = cast("Any", SimpleNamespace(settings=turns, facts={}))
    answer = asyncio.run(MethodEpisode(Book(), chat, at_once).answer_own(ToolCall("read", {})))
    assert answer is not None and answer.text.count(".") < 45
    assert (answer.text.startswith("begin"), answer.text.endswith("end")) == (begins, ends)


@pytest.mark.slow
def test_state_of_such_an_environment_reaches_the_reward_function(tiny_model, sums, tmp_path, write):
    scripted.use(lambda read, seed: "found" if "Nothing" in read else call("look", place="hut"))
    text = BOARD.replace("self.reward, self.looked, self._secret = 0.0, [], object()", "self.looked = []")
    text = text.replace(
        'self.reward = float(place == self.place)\n        return "Gold!" if self.reward else "Nothing."',
        'return "Nothing."',
    )

    def reward(data_source, solution_str, ground_truth, extra_info=None):
        return 0.5 * (extra_info["looked"] == ["hut"])

    given = {f"{R}agent": f"{write('board_without', text)}:Board"}
    rows = samples(run(tiny_model, sums, tmp_path / "out", reward=reward, **BASE | given))
    assert {row["score"] for row in rows} == {0.5}


def test_a_method_that_no_model_could_call_is_refused_and_rows_cannot_bring_tools(tiny_model, sums, tmp_path, write):
    scripted.use(lambda read, seed: "9")
    file = write("board_unknown", BOARD.replace('"""Looks at a place.', '"""'))
    with pytest.raises(UserError, match="the tool look has no docstring"):
        run(tiny_model, sums, tmp_path / "out", **BASE, **{f"{R}agent": f"{file}:Board"})
    guess, board = write("guess_for_rows", GUESS.replace("TAKES", "False")), write("board_for_rows", BOARD)
    given = settings(tiny_model, sums, tmp_path / "rows", **BASE, **{f"{R}agent": f"{guess}:Guess"})
    given.pop("data.train_files")
    rows = [{"prompt": "?", "agent_name": f"{board}:Board"}] * 4
    with pytest.raises(UserError, match=r"rows name the environment .*, which has tools"):
        posttrain.train(given, data=rows)
