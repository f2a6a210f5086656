"""Interactions written for verl answer the model's turns, chosen by the rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "trainer"))

import scripted
from runs import settings

import posttrain
from posttrain.conversations.adapters import Interactions
from posttrain.errors import UserError

R = "actor_rollout_ref__rollout__"
FILE = """
from pathlib import Path

from verl.interactions.base import BaseInteraction


class Counting(BaseInteraction):
    '''Says how often the model has spoken; over after `most` turns.'''

    async def start_interaction(self, instance_id=None, word="again", **kwargs):
        self.words = {**getattr(self, "words", {}), instance_id: word}  # one object leads many conversations
        return await super().start_interaction(instance_id)

    async def generate_response(self, instance_id, messages, **kwargs):
        roles = [one["role"] for one in messages]
        turns = roles.count("assistant")
        assert roles[-1] == "assistant" and kwargs["name"] == self.name
        return turns >= self.config["most"], f"{self.words[instance_id]} {turns}", turns / 4, {"roles": " ".join(roles)}

    async def finalize_interaction(self, instance_id, **kwargs):
        with Path(self.config["log"]).open("a") as log:
            log.write(f"{self.name} {instance_id}\\n")
"""
YAML = """
interaction:
  - name: counting
    class_name: my_interactions.Counting
    config: {{most: 2, log: {log}}}
  - class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {{}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    scripted.use(lambda read, seed: "7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "my_interactions.py").write_text(FILE)
    (tmp_path / "interactions.yaml").write_text(YAML.format(log=tmp_path / "log"))
    yield tmp_path
    sys.modules.pop("my_interactions", None)


def rows(*chosen: dict) -> list[dict]:
    return [
        {"prompt": f"{n}?", "ground_truth": "7", "data_source": "x", "extra_info": {"interaction_kwargs": one}}
        for n, one in enumerate(chosen)
    ]


def train(model, folder, data, reward, **more):
    given = {
        f"{R}name": "scripted",
        f"{R}multi_turn__enable": True,
        f"{R}multi_turn__interaction_config_path": "interactions.yaml",
        f"{R}agent__default_agent_loop": "tool_agent",
        f"{R}agent__processes": 2,
        "data__max_prompt_length": 64,
        "data__max_response_length": 400,
        "trainer__total_training_steps": 2,
    }
    wanted = settings(model, {"train": Path()}, folder / "out", **given | more)
    wanted.pop("data.train_files")
    result = posttrain.train(wanted, data=data, reward=reward)
    return pq.read_table(Path(result.path) / "samples" / "step_1.parquet").to_pylist()


def score_by_turns(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": extra_info["turn_scores"][-1], "turns": len(extra_info["turn_scores"])}


@pytest.mark.slow
def test_rows_choose_an_interaction_which_answers_each_turn_and_ends_the_conversation(tiny_model, folder, capsys):
    scripted.use(lambda read, seed: "6")
    truth = {"name": "gsm8k", "ground_truth": "7"}
    chosen = [{"name": "counting", "word": "more"}, {"name": "counting"}, truth, truth]
    limit = {f"{R}multi_turn__max_user_turns": 3}
    found = train(tiny_model, folder, rows(*chosen), score_by_turns, **limit)
    assert "Interactions: counting, gsm8k; they answer the model's turns." in capsys.readouterr().out
    by_row = {}
    for row in found:
        by_row.setdefault(row["data_row"], []).append((row["num_turns"], row["finish_reason"], row["score"]))
        told = row["response"]
        if row["data_row"] < 2:
            assert f"{'more' if row['data_row'] == 0 else 'again'} 1" in told and "again 2" not in told
        else:
            assert told.count("You need to reflect on your answer") == 3, "three turns of the user"
    assert {kind for row in (0, 1) for kind in by_row[row]} == {(2, "stop", 0.5)}
    assert {kind for row in (2, 3) for kind in by_row[row]} == {(4, "turns", 0.0)}, "one turn more than the user has"
    parts = {json.loads(row["reward_parts"])["turns"] for row in found if row["data_row"] >= 2}
    assert parts == {4.0}, "the last turn is judged, too"
    log = (folder / "log").read_text().split()
    assert set(log[::2]) == {"counting"} and len(set(log[1::2])) == len(log[1::2]) == 12, "each is closed once"


def test_a_right_answer_ends_verls_own_example_and_turn_scores_are_the_reward_without_a_function(tiny_model, folder):
    scripted.use(lambda read, seed: "It is 7" if "reflect" in read else "It is 6")
    found = train(tiny_model, folder, rows(*[{"name": "gsm8k", "ground_truth": "7"}] * 4), None)
    assert {(row["num_turns"], row["score"], row["finish_reason"]) for row in found} == {(2, 1.0, "stop")}
    assert {row["turn_rewards"] for row in found} == {"[[0, 0.0], [1, 1.0]]"}


@pytest.mark.parametrize(
    ("file", "data", "words"),
    [
        (None, rows({"name": "countin"}), "rows name the interaction countin .* Did you mean counting?"),
        (None, rows({}), "a row names no interaction, and interactions.yaml has counting, gsm8k"),
        ("[]", rows({}), "has no list `interaction`"),
        ("interaction: []", rows({}), "has no list `interaction`"),
        ("interaction: [{name: x}]", rows({}), "has no class_name"),
        (
            "interaction: [{class_name: my_interactions.Path}]",
            rows({}),
            "is no interaction: it has no `async def start",
        ),
        ("interaction: [{class_name: my_interactions.Countin}]", rows({}), "did you mean Counting?"),
        ("interaction: [{class_name: nowhere.Counting}]", rows({}), "there is no module nowhere"),
    ],
)
def test_what_is_wrong_with_interactions_is_said_before_the_first_step(tiny_model, folder, file, data, words):
    if file is not None:
        (folder / "interactions.yaml").write_text(file)
    with pytest.raises(UserError, match=words):
        train(tiny_model, folder, data * 4, score_by_turns)


def test_two_interactions_of_one_name_are_refused_and_one_alone_needs_no_name(folder):
    entry = "{class_name: my_interactions.Counting, config: {most: 1}}"
    (folder / "two.yaml").write_text(f"interaction: [{entry}, {entry}]")
    with pytest.raises(UserError, match=r"two interactions of two\.yaml are called counting"):
        Interactions("two.yaml")
    (folder / "one.yaml").write_text(f"interaction: [{entry}]")
    assert Interactions("one.yaml").name_of(None) == "counting"


def test_an_agent_beside_interactions_is_refused(tiny_model, folder):
    with pytest.raises(UserError, match=r"interaction_config_path` has no effect on the agent x\.py:play"):
        train(
            tiny_model,
            folder,
            rows({}),
            None,
            **{f"{R}agent__path": "x.py:play", f"{R}agent__default_agent_loop": None},
        )
