"""Rewards of turns that add up to the score stand at the ends of their turns, for estimators that look at tokens."""

from __future__ import annotations

import numpy as np
import pytest
import scripted
import torch
from agent_runs import AGENT, R
from runs import run

from posttrain import algorithms
from posttrain.batch.samples import sample_of_rows
from posttrain.conversations.agents import AGENTS, register_agent
from posttrain.trainer.ppo import advantages

BOARD = """
class Board:
    takes_token_ids = True

    def __init__(self, late: bool = False, gives_score: bool = True):
        self.turns, self.late, self.gives_score = 0, late, gives_score

    def reset(self, row, seed):
        return [7, 8, 9]

    def step(self, action):
        self.turns += 1
        return [10, 11, 12], (0.0 if self.late else 0.25) * self.turns + self.late * (self.turns == 3), self.turns == 3
"""
EVERY = {2: 0.25, 8: 0.5, 14: 0.75}  # a turn has three tokens, and as many are read between two


@pytest.fixture
def given(monkeypatch):
    """What the estimators got, and (advantages, returns) that they made."""
    found, compute = [], algorithms.compute_advantage

    def noted(name, **fields):
        made = compute(name, **fields)
        found.append({**fields, "made": made})
        return made

    monkeypatch.setattr(advantages.algorithms, "compute_advantage", noted)
    return found


def play(tiny_model, sums, tmp_path, monkeypatch, estimator: str, **settings):
    (tmp_path / "board.py").write_text(BOARD)
    monkeypatch.chdir(tmp_path)
    scripted.use(lambda read, seed: "42")
    more = {f"{R}agent": "board.py:Board", "algorithm__adv_estimator": estimator}
    return run(tiny_model, sums, tmp_path / estimator, **AGENT | more | settings)


def standing(rewards_R: torch.Tensor) -> dict[int, float]:
    return {place: float(rewards_R[place]) for place in rewards_R.nonzero().flatten().tolist()}


def test_an_environments_rewards_stand_where_its_turns_end_and_their_sum_is_the_score(
    tiny_model, sums, tmp_path, monkeypatch, given
):
    gamma = 0.5
    settings = {"algorithm__gamma": gamma}
    play(tiny_model, sums, tmp_path, monkeypatch, "reinforce_plus_plus", **settings)
    rewards_BR, mask_BR = given[0]["token_level_rewards"], given[0]["response_mask"]
    assert [standing(row) for row in rewards_BR] == [EVERY] * len(rewards_BR)
    # What a token has yet to earn, counting sampled tokens alone.
    returns_R, wanted = torch.zeros(mask_BR.shape[1]), 0.0
    for place in reversed(range(mask_BR.shape[1])):
        if mask_BR[0, place]:
            wanted = float(rewards_BR[0, place]) + gamma * wanted
            returns_R[place] = wanted
    torch.testing.assert_close(given[0]["made"][1][0], returns_R)


def test_a_reward_for_the_last_turn_alone_stands_on_the_last_token(tiny_model, sums, tmp_path, monkeypatch, given):
    late = {f"{R}agent__config": {"late": True}}
    play(tiny_model, sums, tmp_path, monkeypatch, "reinforce_plus_plus", **late)
    assert [standing(row) for row in given[0]["token_level_rewards"]] == [{14: 1.0}] * len(
        given[0]["token_level_rewards"]
    )


SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {}(extra_info["turn_rewards"])
"""


@pytest.mark.parametrize(("function", "wanted"), [("max", {14: 0.75}), ("sum", EVERY)])
def test_a_reward_functions_score_stands_on_the_last_token_unless_it_is_the_sum(
    tiny_model, sums, tmp_path, monkeypatch, given, function, wanted
):
    (tmp_path / "score.py").write_text(SCORE.format(function))
    more = {f"{R}agent__config": {"gives_score": False}, "custom_reward_function__path": "score.py", "reward": None}
    play(tiny_model, sums, tmp_path, monkeypatch, "reinforce_plus_plus", **more)
    rewards_BR = given[0]["token_level_rewards"]
    assert [standing(row) for row in rewards_BR] == [wanted] * len(rewards_BR)


def test_estimators_of_whole_responses_get_the_sum(tiny_model, sums, tmp_path, monkeypatch, given):
    play(tiny_model, sums, tmp_path, monkeypatch, "grpo")
    torch.testing.assert_close(given[0]["token_level_rewards"].sum(-1), torch.full((12,), 1.5))


@pytest.fixture
def branching():
    @register_agent("branching")
    async def branching(chat, row):
        await chat.say(max_tokens=2)
        chat.add_reward(0.25)
        helper = chat.branch([{"role": "user", "content": "help"}])
        await helper.say(max_tokens=3)
        chat.add_reward(0.5)
        chat.tell("go on")
        await chat.say(max_tokens=2)
        chat.add_reward(1.0)
        return 1.75

    yield
    AGENTS.clear()


def test_rewards_of_branches_stand_in_the_rows_of_their_turns(
    tiny_model, sums, tmp_path, monkeypatch, branching, given
):
    batches = []
    compute = advantages.compute_advantage
    for name in ("ray_trainer", "advantages"):
        module = __import__(f"posttrain.trainer.ppo.{name}", fromlist=["_"])
        monkeypatch.setattr(
            module, "compute_advantage", lambda data, *a, **k: batches.append(data) or compute(data, *a, **k)
        )
    settings = {
        **AGENT,
        f"{R}name": "native",
        f"{R}agent": "branching",
        "algorithm__adv_estimator": "reinforce_plus_plus",
    }
    run(tiny_model, sums, tmp_path, **settings)
    data = batches[0]
    rewards_BR, ends = data.batch["token_level_rewards"], data.non_tensor_batch["turn_ends"]
    by_turn = {0: 0.25, 1: 0.5, 2: 1.0}
    wanted = [{end - 1: by_turn[turn] for turn, end in own} for own in ends]
    assert [standing(row) for row in rewards_BR] == wanted and {len(own) for own in wanted} == {1, 2}
    # As one response, in the order of the turns: what is still to be earned at its first token.
    first = np.unique(sample_of_rows(data), return_index=True)[1]
    assert len(first) < len(data)
    torch.testing.assert_close(given[0]["token_level_rewards"].sum(-1), torch.full((len(first),), 1.75))
