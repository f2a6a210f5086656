"""Document 4, part 3: PPO with a reward model and with a function, each key by its effect on a small run."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_models import other_tokenizer, write_reward_model
from seen import Seen, see, settings

import posttrain
from posttrain.trainer import embedded
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

WARMUP, STEPS = 1, 3
KEYS: dict[str, Any] = {  # §3.1 but for the rates and the warm-up, which must show in a few steps
    "algorithm__adv_estimator": "gae",
    "algorithm__gamma": 1.0,
    "algorithm__lam": 0.95,
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__type": "adaptive",
    "algorithm__kl_ctrl__kl_coef": 0.02,
    "algorithm__kl_ctrl__target_kl": 0.01,
    "actor_rollout_ref__actor__optim__lr": 1e-3,
    "actor_rollout_ref__actor__optim__lr_scheduler_type": "linear",
    "actor_rollout_ref__actor__ppo_epochs": 4,
    "actor_rollout_ref__actor__clip_ratio": 0.2,
    "actor_rollout_ref__actor__entropy_coeff": 0.01,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
    "critic__optim__lr": 1e-2,
    "critic__optim__lr_scheduler_type": "cosine",
    "critic__ppo_epochs": 3,
    "critic__ppo_mini_batch_size": 4,
    "critic__cliprange_value": 0.2,
    "reward_model__enable": True,
    "reward_model__micro_batch_size_per_gpu": 16,
    "trainer__critic_warmup": WARMUP,
    "trainer__total_training_steps": STEPS,
}


def flat(worker_group: Any) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in worker_group.worker.engine.module.parameters()]).clone()


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("rm") / "other", tokenizer=other_tokenizer())


@pytest.fixture(scope="module")
def ppo(small, parquet, reward_model) -> Seen:
    """A run with the document's keys; `weights[k]` are (actor, critic) before step k + 1."""
    weights: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = RayPPOTrainer._update

    def update(self: RayPPOTrainer, batch: Any, step: int) -> dict[str, float]:
        weights.append((flat(self.actor_rollout_wg), flat(self.critic_wg)))
        return plain(self, batch, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayPPOTrainer, "_update", update)
        seen = small(
            reward=None, reward_model__model__path=str(reward_model), data__val_files=str(parquet["test"]), **KEYS
        )
    weights.append((flat(seen.trainer.actor_rollout_wg), flat(seen.trainer.critic_wg)))
    seen.weights = weights  # pyright: ignore
    return seen


def test_the_estimator_is_named_and_a_critic_is_made(ppo):
    assert "Using advantage estimator: gae" in ppo.console and ", critic, reward model" in ppo.console


def test_advantages_follow_the_plain_recursion(ppo):
    batch = ppo.trainer.batches[-1].batch
    rewards, values, mask = (batch[name].double() for name in ("token_level_rewards", "values", "response_mask"))
    assert values.abs().max() > 0
    for row in range(len(rewards)):
        advantage = 0.0
        for t in reversed(range(int(mask[row].sum()))):
            after = float(values[row, t + 1]) if t + 1 < int(mask[row].sum()) else 0.0
            advantage = float(rewards[row, t]) + after - float(values[row, t]) + 0.95 * advantage
            assert float(batch["returns"][row, t]) == pytest.approx(advantage + float(values[row, t]), abs=1e-5)


def test_kl_is_taken_from_the_reward_token_by_token(ppo):
    batch, line = ppo.trainer.batches[-1].batch, ppo.steps[-1]
    kl = (batch["old_log_probs"] - batch["ref_log_prob"]) * batch["response_mask"]
    assert kl.abs().max() > 0
    expected = batch["token_level_scores"] - line["actor/reward_kl_penalty_coeff"] * kl
    torch.testing.assert_close(batch["token_level_rewards"], expected, rtol=0, atol=1e-6)


def test_the_coefficient_starts_at_its_value_and_adapts_to_the_target(ppo):
    lines = ppo.steps
    assert lines[0]["actor/reward_kl_penalty_coeff"] == 0.02
    for before, after in pairwise(lines):
        error = min(max(before["actor/reward_kl_penalty"] / 0.01 - 1, -0.2), 0.2)
        rows = len(ppo.trainer.batches[0])
        expected = before["actor/reward_kl_penalty_coeff"] * (1 + error * rows / 10000)
        assert after["actor/reward_kl_penalty_coeff"] == pytest.approx(expected, rel=1e-9)
        assert after["actor/reward_kl_penalty_coeff"] != before["actor/reward_kl_penalty_coeff"]


def test_the_critic_starts_from_the_actors_model_and_says_so(ppo):
    assert ppo.console.count("critic.model.path is not set: the critic starts from the actor's model") == 1
    actor, critic = ppo.weights[0]
    head = 32 + 1  # weight and bias of the value head
    assert torch.equal(critic[:-head], actor[: len(critic) - head]) and not critic[-head:].any()


def test_actor_and_critic_have_rates_and_schedules_of_their_own(ppo):
    trained = ppo.steps[WARMUP:]
    updates = 4 * 2 * len(trained)
    linear = [1e-3 * (1 - step / updates) for step in range(updates)]
    for number, line in enumerate(trained):  # the schedule counts the actor's own steps, not those of the warm-up
        assert line["actor/lr"] == pytest.approx(sum(linear[8 * number : 8 * number + 8]) / 8)
    cosine = [1e-2 * 0.5 * (1 + math.cos(math.pi * step / 9)) for step in range(9)]
    for number, line in enumerate(ppo.steps):
        assert line["critic/lr"] == pytest.approx(sum(cosine[3 * number : 3 * number + 3]) / 3)


def test_passes_and_mini_batches_are_counted_for_each(ppo):
    for line in ppo.steps:
        assert line["critic/optimizer_steps"] == 3 * 1
    assert [line.get("actor/optimizer_steps") for line in ppo.steps] == [None, 4 * 2, 4 * 2]
    assert ppo.updates == 4 * 2 * (STEPS - WARMUP)
    assert ppo.trainer.critic_wg.worker.engine.optimizer.steps_done == 3 * STEPS


def test_clip_fractions_and_the_entropy_bonus_are_metrics(ppo):
    for line in ppo.steps[WARMUP:]:
        assert 0 <= line["actor/pg_clipfrac"] <= 1
        assert line["actor/loss"] == pytest.approx(line["policy_loss"] - 0.01 * line["actor/entropy"], abs=1e-6)
    assert any(line["critic/vf_clipfrac"] > 0 for line in ppo.steps)
    assert all(0 <= line["critic/vf_clipfrac"] <= 1 for line in ppo.steps)


def test_value_metrics_tell_how_good_the_critic_is(ppo):
    for line, data in zip(ppo.steps, ppo.trainer.batches, strict=True):
        batch, mask = data.batch, data.batch["response_mask"].bool()
        returns, values = batch["returns"][mask].double(), batch["values"][mask].double()
        explained = 1 - float((returns - values).var(unbiased=False) / returns.var(unbiased=False))
        assert line["critic/vf_explained_var"] == pytest.approx(explained, abs=1e-9)
        assert line["critic/values/mean"] == pytest.approx(float(values.mean()), abs=1e-9)
        assert line["critic/vf_loss"] > 0 and math.isfinite(line["critic/vpred_mean"])
    assert ppo.steps[0]["critic/vf_explained_var"] == 0.0 != ppo.steps[1]["critic/vf_explained_var"]


def test_the_models_scores_are_the_rewards_and_the_function_is_recorded(ppo):
    assert "Reward: 1 x reward model; the function's score is recorded" in ppo.console
    for line, batch in zip(ppo.steps, ppo.trainer.batches, strict=True):
        scores = batch.batch["token_level_scores"]
        last = batch.batch["response_mask"].sum(-1) - 1
        assert scores.ne(0).nonzero()[:, 1].tolist() == last.tolist()
        again = ppo.trainer.rm_wg.compute_rm_score(batch).batch["rm_scores"]
        torch.testing.assert_close(scores, again, rtol=0, atol=1e-5)
        assert line["reward_mean"] == pytest.approx(line["reward_model/mean"]) != 0
        assert line["reward_model/failures"] == line["reward_model/truncated"] == 0 < line["reward_model/std"]
        assert line["reward/function/mean"] == line["right/mean"] < 0.2  # an untrained model is right by chance
    parts = [json.loads(row["reward_parts"]) for row in ppo.samples()]
    assert all({"reward_model", "function", "acc"} <= set(part) for part in parts)
    assert [row["score"] for row in ppo.samples()] == pytest.approx([part["reward_model"] for part in parts])


def test_validation_is_by_the_function_and_shows_the_models_score_beside_it(ppo):
    first = ppo.lines[0]
    assert first["val/math_reasoning/mean@1"] == 0.0 != first["val/math_reasoning/reward_model/mean@1"]


def test_in_the_warm_up_the_critic_learns_and_the_actor_stays_to_the_bit(ppo):
    actors, critics = zip(*ppo.weights, strict=True)
    assert torch.equal(actors[0], actors[1]) and not torch.equal(actors[1], actors[2])
    assert all(not torch.equal(a, b) for a, b in pairwise(critics))
    assert [line["critic/warmup"] for line in ppo.steps] == [1.0, 0.0, 0.0]
    assert "The first step trains the critic only." in ppo.console


def test_a_warm_up_over_the_whole_epoch_is_said(small):
    """As the document has it: one epoch, ten steps of warm-up, and the data does not reach that far."""
    seen = small(
        algorithm__adv_estimator="gae",
        trainer__critic_warmup=10,
        trainer__total_training_steps=None,
        trainer__total_epochs=1,
        data__train_max_samples=8,
    )
    assert "covers all 2 steps: the actor never changes" in seen.console
    assert len(seen.steps) == 2 and seen.updates == 0  # S4-51: one pass over 8 prompts in batches of 4


def test_without_a_reward_model_none_is_loaded(gae):
    assert gae.trainer.rm_wg is None and "reward model" not in gae.console


def test_the_command_with_a_function_runs_on_the_embedded_task(tiny_model, sums, tmp_path, main_ppo, monkeypatch):
    folder = tmp_path / "embedded"
    shutil.copytree(tiny_model, folder / "model")
    for name in ("train", "test"):
        shutil.copy(sums[name], folder / f"{name}.json")
    monkeypatch.setattr(embedded, "ensure_embedded", lambda say, model: folder)
    seen = main_ppo(
        "algorithm.adv_estimator=gae",
        "reward_model.enable=False",
        "trainer.reward_fn.type=function",
        "trainer.reward_fn.path=posttrain.utils.reward_score.gsm8k_reward",
        "trainer.total_training_steps=1",
        "data.train_batch_size=4",
        "trainer.device=cpu",
        "reward.num_workers=1",
    )
    assert seen.status == 0 and "(`embedded`) serves" in seen.console and seen.trainer.rm_wg is None
    assert seen.steps[0]["critic/optimizer_steps"] == 1


def test_two_rewards_are_summed_with_their_weights(tiny_model, parquet, reward_model, tmp_path):
    def short(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0 / (1 + len(solution_str))

    keys = settings(
        tiny_model, parquet, tmp_path, reward_model__enable=True, reward_model__model__path=str(reward_model),
        reward_model__weight=0.5, reward_model__function_weight=-2.0, trainer__total_training_steps=1,
    )  # fmt: skip
    seen = see(lambda: posttrain.train(keys, reward=short))
    assert "Reward: 0.5 x reward model + -2 x function." in seen.console
    for row in seen.samples():
        parts = json.loads(row["reward_parts"])
        assert row["score"] == pytest.approx(0.5 * parts["reward_model"] - 2.0 * parts["function"], abs=1e-6)
