"""Runs whose conversations are led by an environment, by messages or by token ids."""

from __future__ import annotations

import json
import random

import pytest
import scripted
from agent_runs import AGENT, R, samples, split, tries
from runs import metrics_of, run

from posttrain.errors import UserError
from posttrain.models.embedded import byte_tokenizer

ENVIRONMENT = """
import random
import threading
import time


class Guess:
    closed = []

    def __init__(self, top: int = 3, kind: str = "text"):
        self.top, self.kind, self.left = top, kind, 3

    @property
    def takes_token_ids(self):
        return self.kind == "ids"

    def reset(self, row, seed):
        self.secret, self.row = random.Random(seed).randint(1, self.top), row
        if self.kind == "broken":
            raise ConnectionError("no board")
        if self.kind == "ids":
            return [7, 8, 9]
        if self.kind == "own prompt":
            return None
        return f"{row['index']}: guess" if self.kind == "text" else [{"role": "user", "content": "guess"}]

    def step(self, action):
        time.sleep(0.01)  # may block: it runs in a thread
        self.left -= 1
        if self.kind == "ids":
            return [10, 11, 12], 0.5, self.left == 1, {"saw": list(action)}
        right = action == str(self.secret)
        told = "no, say %d!" % self.secret
        return told if self.kind == "text" else {"role": "user", "content": told}, right * 1.0, right or not self.left

    async def close(self):
        Guess.closed.append(self)
"""


@pytest.mark.parametrize("kind", ["text", "messages", "own prompt"])
def test_an_environment_is_played_by_messages_and_its_rewards_are_the_score(
    tiny_model, sums, tmp_path, monkeypatch, kind
):
    (tmp_path / "board.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    scripted.use(tries)
    more = {f"{R}agent": "board.py:Guess", f"{R}agent__config": {"top": 2, "kind": kind}, f"{R}n": 6}
    result = run(tiny_model, sums, tmp_path, **AGENT | more)
    rows = samples(result)
    seen = set()
    for row in rows:
        secret, first = random.Random(row["seed"]).randint(1, 2), str(row["seed"] % 3)
        right = first == str(secret)
        seen.add(right)
        written, told = split(row)
        assert written == (f"{first}<|end|>" if right else f"{first}<|end|>{secret}<|end|>")
        assert told == ("" if right else f"<|user|>no, say {secret}!<|end|><|assistant|>")
        assert (row["score"], row["num_turns"], row["error"]) == (1.0, 2 - right, None)
        assert row["prompt"].endswith("guess<|end|><|assistant|>") == (kind != "own prompt")
        assert sum(tokens for _, tokens in json.loads(row["policy_versions"])) == sum(row["response_mask"])
    assert seen == {True, False} and metrics_of(result.path)[0]["reward_mean"] == 1.0


def test_an_environment_of_token_ids_reads_and_writes_ids_as_they_are(tiny_model, sums, tmp_path, monkeypatch):
    (tmp_path / "board.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    engines = scripted.use(lambda read, seed: "42")
    more = {f"{R}agent": "board.py:Guess", f"{R}agent__config": {"kind": "ids"}}
    end = byte_tokenizer().eos_token_id
    (four, two) = byte_tokenizer()("42", add_special_tokens=False)["input_ids"]
    for row in samples(run(tiny_model, sums, tmp_path, **AGENT | more)):
        assert row["response_ids"] == [four, two, end, 10, 11, 12, four, two, end]
        assert row["response_mask"] == [1, 1, 1, 0, 0, 0, 1, 1, 1] and row["score"] == 1.0
    (engine,) = engines
    assert {tuple(request.prompt_ids) for request in engine.seen if len(request.id) == 2} == {(7, 8, 9)}


def test_an_environment_that_cannot_be_made_or_fails_says_so(tiny_model, sums, tmp_path, monkeypatch):
    (tmp_path / "board.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    scripted.use(tries)
    wrong = {f"{R}agent": "board.py:Guess", f"{R}agent__config": {"bottom": 2}}
    with pytest.raises(UserError, match=r"environment board.py:Guess cannot be made with .*'bottom'"):
        run(tiny_model, sums, tmp_path / "a", **AGENT | wrong)
    with pytest.raises(UserError, match=r"(?s)failed on all 12 responses.*no board \(board.py, line 20\)"):
        run(
            tiny_model,
            sums,
            tmp_path / "b",
            **AGENT | {f"{R}agent": "board.py:Guess", f"{R}agent__config": {"kind": "broken"}},
        )


SHAPES = """
class Shapes:
    def __init__(self, reset="a board", step=None):
        self.made = reset, step

    def reset(self, row, seed):
        return self.made[0]

    def step(self, action):
        return self.made[1]


class NoStep:
    def reset(self, row, seed):
        return "a board"
"""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"step": ["next", 1.0]},
            r"Shapes.step returned \['next', 1.0\]; expected \(observation, finite reward, done\)",
        ),
        ({"step": [5, 1.0, False]}, r"Shapes.step returned \[5, 1.0, False\]; .* an observation is a text, a message"),
        ({"step": ["next", "one", False]}, r"Shapes.step returned \['next', 'one', False\]; expected"),
        ({"step": ["next", 1.0, False, {}, 2]}, r"Shapes.step returned .*; expected"),
        ({}, r"Shapes.step returned None; expected"),
        ({"reset": 5}, r"Shapes.reset returned 5; expected a text, a message, .*, or None for the row's prompt"),
        ({"reset": [1, "two"]}, r"Shapes.reset returned \[1, 'two'\]; expected"),
        ({"reset": {"role": "user"}}, r"Shapes.reset returned \{'role': 'user'\}; expected"),
        ({"step": [{"board": "x"}, 1.0, False]}, r"Shapes.step returned \[\{'board': 'x'\}, 1.0, False\]; expected"),
        ({"step": ["next", float("nan"), False]}, r"Shapes.step returned \['next', nan, False\]; .*finite reward"),
        ({"step": [[10**6], 1.0, False]}, "token id 1000000 is not in the vocabulary"),
    ],
)
def test_a_result_of_the_wrong_shape_names_class_method_and_what_was_expected(
    tiny_model, sums, tmp_path, monkeypatch, config, said
):
    (tmp_path / "board.py").write_text(SHAPES)
    monkeypatch.chdir(tmp_path)
    scripted.use(tries)
    with pytest.raises(UserError, match=rf"(?s)failed on all 12 responses.*{said}"):
        run(tiny_model, sums, tmp_path / "out", **AGENT | {f"{R}agent": "board.py:Shapes", f"{R}agent__config": config})


def test_a_class_with_reset_but_no_step_is_rejected_as_such(tiny_model, sums, tmp_path, monkeypatch):
    (tmp_path / "board.py").write_text(SHAPES)
    monkeypatch.chdir(tmp_path)
    scripted.use(tries)
    with pytest.raises(UserError, match=r"the environment board\.py:NoStep has `reset` but no `step`"):
        run(tiny_model, sums, tmp_path / "out", **AGENT | {f"{R}agent": "board.py:NoStep"})
