"""Conversations that end in several rows: one sample, one advantage, every sampled token trained once."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from runs import metrics_of, run

from posttrain.algorithms import ADV_ESTIMATORS, AlgorithmError, register_adv_est
from posttrain.commands.replay import replay
from posttrain.config.root import AlgorithmConfig
from posttrain.conversations.agents import AGENTS, register_agent
from posttrain.conversations.conversation import ChatError, Conversation, Limits
from posttrain.protocol import DataProto
from posttrain.rollout.base import Output
from posttrain.trainer.ppo.advantages import compute_advantage

R = "actor_rollout_ref__rollout__"
COMMON = {
    "data__max_prompt_length": 64,
    "data__max_response_length": 64,
    f"{R}agent": "tree",
    f"{R}agent__processes": 2,
    f"{R}n": 4,
}


def reward_of(row) -> float:
    """Differs within a group, and does not depend on what was sampled."""
    return float(row["sample"] % 3)


@pytest.fixture(autouse=True)
def registered():
    @register_agent("tree")
    async def tree(chat, row, *, flat: bool = False):
        """Sample 0 has one row; 1 is compacted twice; 2 asks a sub-agent; 3 tries two continuations. With `flat` every
        third prompt has no signal."""
        sample = row["sample"]
        await chat.say(max_tokens=4)
        if sample == 1:
            for number in range(2):
                chat.compact([{"role": "user", "content": f"so far: {number}"}])
                await chat.say(max_tokens=3)
        if sample == 2:
            helper = chat.branch([{"role": "user", "content": "help"}])
            await helper.say(max_tokens=2)
            helper.tell("more")
            words = await helper.say(max_tokens=2)
            chat.tell(f"it says {len(words)}")
            await chat.say(max_tokens=3)
        if sample == 3:
            chat.tell("go on")
            other = chat.branch()
            await chat.say(max_tokens=2)
            await other.say(max_tokens=3)
        return 0.0 if flat and int(row["uid"]) % 3 == 0 else reward_of(row)

    yield
    AGENTS.clear()


def rows_of(path: Path, name: str = "step_1") -> list[dict]:
    return pq.read_table(path / "samples" / f"{name}.parquet").to_pylist()


def by_sample(rows: list[dict]) -> dict[tuple, list[dict]]:
    found = defaultdict(list)
    for row in rows:
        found[row["uid"], row["sample"]].append(row)
    return found


def test_each_branch_is_a_row_of_its_sample_with_one_advantage(tiny_model, sums, tmp_path):
    result = run(tiny_model, sums, tmp_path, **COMMON)
    samples = by_sample(rows_of(result.path))
    assert len(samples) == 4 * 4
    shapes = {
        0: [(0, None, 0)],
        1: [(0, None, 0), (1, 0, None), (2, 1, None)],
        2: [(1, 0, None), (0, None, 0)],
        3: [(0, None, 0), (1, 0, None)],
    }
    for (_, sample), rows in samples.items():
        found = [(row["branch"], row["parent"]) for row in rows]
        assert found == [shape[:2] for shape in shapes[sample]], "in the order of their last turns"
        assert {row["score"] for row in rows} == {float(sample % 3)}
        advantages = {a for row in rows for a, own in zip(row["advantages"], row["response_mask"], strict=True) if own}
        assert len(advantages) == 1
    # The same numbers as a group of four responses: mean and deviation count a sample once.
    scores = np.array([reward_of({"sample": sample}) for sample in range(4)])
    wanted = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    for (_, sample), rows in samples.items():
        assert rows[0]["advantage"] == pytest.approx(wanted[sample], abs=1e-6)
    (first, *_) = metrics_of(result.path)
    assert first["reward_mean"] == scores.mean() and first["groups/count"] == 4
    assert (first["num_rows/mean"], first["num_rows/max"]) == (2.0, 3.0)


def test_a_shared_beginning_is_trained_in_one_row_only(tiny_model, sums, tmp_path):
    result = run(tiny_model, sums, tmp_path, **COMMON)
    for (_, sample), rows in by_sample(rows_of(result.path)).items():
        turns = rows[0]["num_turns"]
        assert turns == {0: 1, 1: 3, 2: 4, 3: 3}[sample]
        ids = {row["branch"]: [*row["prompt_ids"], *row["response_ids"]] for row in rows}
        for row in rows:
            if row["parent"] is not None:
                fork = row["fork"]
                assert ids[row["branch"]][:fork] == ids[row["parent"]][:fork]
                assert not any(row["response_mask"][: max(0, fork - len(row["prompt_ids"]))])
        if sample == 3:  # both continue behind the first turn and what was told
            main, other = sorted(rows, key=lambda row: row["branch"])
            assert other["fork"] >= len(main["prompt_ids"]) + 4
            assert sum(main["response_mask"]) == 4 + 2 and sum(other["response_mask"]) == 3
        trained = sum(sum(row["response_mask"]) for row in rows)
        written = sum(count for row in rows for _, count in json.loads(row["policy_versions"]))
        assert trained == written == {0: 4, 1: 10, 2: 11, 3: 9}[sample]


SHUFFLED = {
    "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
    "actor_rollout_ref__actor__shuffle": True,
    "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean",
    "algorithm__filter_groups__enable": True,
    "algorithm__filter_groups__metric": "score",
    f"{R}agent__path": "tree",
    f"{R}agent__config__flat": True,
}


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_same_with_trees_in_the_surplus(tiny_model, sums, tmp_path):
    how = (
        {key: value for key, value in COMMON.items() if key != f"{R}agent"}
        | SHUFFLED
        | {"trainer__save_freq": 2, "tracking__keep_batches": -1}
    )
    whole = run(tiny_model, sums, tmp_path / "whole", **how, trainer__total_training_steps=4)
    run(tiny_model, sums, tmp_path / "parts", **how, trainer__total_training_steps=2)
    parts = run(tiny_model, sums, tmp_path / "parts", **how, trainer__total_training_steps=4)
    wanted, found = metrics_of(whole.path), metrics_of(parts.path)
    assert any(line.get("filter_groups/surplus", 0) > 0 for line in wanted)
    assert [line for line in found if "step" in line][-2:] == [line for line in wanted if "step" in line][-2:]
    assert rows_of(parts.path, "step_4") == rows_of(whole.path, "step_4")
    # A recorded step gives the same losses again: its rows are cut into the same mini-batches.
    *_, replayed = replay(whole.path, 2, 4)
    assert "policy_loss" in replayed.metrics and replayed.differing == {}


def test_a_critic_learns_from_the_turns_of_a_sample_in_their_order(tiny_model, sums, tmp_path):
    how = {"algorithm__adv_estimator": "gae", "critic__optim__lr": 1e-3, "algorithm__use_kl_in_reward": True}
    result = run(tiny_model, sums, tmp_path, **COMMON, **how)
    assert all("critic/vf_loss" in line for line in metrics_of(result.path) if line["step"] > 0)


@pytest.fixture
def batch() -> DataProto:
    """Two samples of one group: a main row of two turns with a sub-agent's row between them, and a single row."""
    fields = {
        "uid": ["a", "a", "a"],
        "sample": [0, 0, 1],
        "branch": [1, 0, 0],
        "parent": [0, None, None],
        "fork": [0, 0, 0],
        "turn_ends": [[(1, 2)], [(0, 2), (2, 5)], [(0, 3)]],
    }
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 0, 1, 1], [1, 1, 1, 0, 0]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 0], [0, 0, 0, 0, 2.0], [0, 0, 1.0, 0, 0]])
    values = torch.arange(15).view(3, 5) / 10
    tensors = {"token_level_rewards": rewards, "response_mask": mask, "values": values}
    return DataProto.from_dict(tensors, fields)


def test_turns_of_all_rows_are_one_trajectory_to_gae(batch):
    settings = AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.8)
    found = compute_advantage(batch[:], "gae", config=settings)
    value = batch.batch["values"]
    # Main row, first turn; sub-agent; main row, an observation and the second turn.
    order = [(1, 0), (1, 1), (0, 0), (0, 1), (1, 2), (1, 3), (1, 4)]
    flat = {
        "token_level_rewards": torch.tensor([[0.0, 0, 0, 0, 0, 0, 2.0], [0, 0, 1.0, 0, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 0, 0]]),
        "values": torch.stack([torch.stack([value[place] for place in order]), torch.cat([value[2], torch.zeros(2)])]),
    }
    wanted = compute_advantage(DataProto.from_dict(flat, {"uid": ["a", "a"]}), "gae", config=settings)
    for name in ("advantages", "returns"):
        for number, place in enumerate(order):
            assert found.batch[name][place] == wanted.batch[name][0, number]
        assert torch.equal(found.batch[name][2, :3], wanted.batch[name][1, :3])
        assert not found.batch[name][0, 2:].any(), "nothing where nothing was sampled"


@pytest.mark.parametrize("name", [name for name, one in ADV_ESTIMATORS.items() if one.several_rows == "sample"])
def test_other_estimators_give_a_sample_one_advantage(batch, name):
    batch.non_tensor_batch["reward_score"] = np.array([2.0, 2.0, 1.0], dtype=object)
    batch.non_tensor_batch["reward_parts"] = np.array([{}, {}, {}], dtype=object)
    found = compute_advantage(batch[:], name, config=AlgorithmConfig(adv_estimator=name)).batch["advantages"]
    single = DataProto.from_dict(
        {
            "token_level_rewards": torch.tensor([[2.0, 0, 0, 0, 0, 0], [1.0, 0, 0, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]),
        },
        {"uid": ["a", "a"], "reward_score": [2.0, 1.0], "reward_parts": [{}, {}]},
    )
    wanted = compute_advantage(single, name, config=AlgorithmConfig(adv_estimator=name)).batch["advantages"]
    own = batch.batch["response_mask"].bool()
    assert set(found[:2][own[:2]].tolist()) == {float(wanted[0, 0])} and float(found[2, 0]) == float(wanted[1, 0])
    assert not found[~own].any()


def test_an_estimator_that_does_not_say_how_rows_enter_it_is_rejected(batch):
    register_adv_est("rowwise")(lambda token_level_rewards, response_mask, **_: (token_level_rewards,) * 2)
    try:
        with pytest.raises(AlgorithmError, match="`rowwise` does not declare how these enter it"):
            compute_advantage(batch, "rowwise")
        single = batch[[2]]
        assert torch.equal(compute_advantage(single, "rowwise").batch["advantages"][0], torch.tensor([0.0, 0, 1, 0, 0]))
    finally:
        ADV_ESTIMATORS.pop("rowwise")


def test_composed_rows_train_a_turn_that_two_of_them_contain_once():
    record = Conversation(("a", 0), [1, 2], seed=0, how={})
    limits = Limits(4, 8)
    turns = [Output(0, [5, 6], log_probs, "stop", [(0, 2)]) for log_probs in ([-1.0, -2.0], [-3.0, -4.0])]
    record.samples += zip([[1, 2], [1, 2, 5, 6, 9]], turns, strict=True)
    record.compose(limits, [1, 2], [5, 6], [1, 1])
    record.compose(limits, [1, 2], [5, 6, 9, 5, 6], [1, 1, 0, 1, 1])
    record.compose(limits, [1, 2, 5, 6, 9], [5, 6], [1, 1])  # a prompt of 5 tokens, more than a prompt may have
    rows = record.rows
    assert [row.mask for row in rows] == [[True, True], [False, False, False, True, True]], "the third has nothing new"
    assert list(rows[1].output("z", "stop").log_probs) == [0.0, 0.0, 0.0, -3.0, -4.0]
    assert [record.parent_row(row) for row in rows] == [(None, 0), (0, 4)]


def test_a_branch_that_does_not_fit_a_row_is_rejected():
    record = Conversation(("a", 0), [1, 2], seed=0, how={})
    branch = record.open_branch([1, 2, *[3] * 5], Limits(4, 6))
    assert (branch.prompt_ids, branch.length, branch.mask) == ([1, 2], 5, [False] * 5), "with its parent's prompt"
    branch = record.open_branch([1, 2, *[3] * 7], Limits(4, 6))
    assert (branch.prompt_ids, branch.length) == ([1, 2, 3, 3], 5), "what does not fit is in the prompt"
    with pytest.raises(ChatError, match="a branch begins with 10 tokens; a row has at most 10"):
        record.open_branch([1, 2, *[3] * 8], Limits(4, 6))
