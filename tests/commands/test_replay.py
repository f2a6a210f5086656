"""`posttrain replay` makes past updates again: the same losses and weights, bit for bit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import posttrain
from posttrain.cli import main
from posttrain.commands.replay import ReplayError, find_start, replay, replayable
from posttrain.tracking.rundir import kept_steps


def right(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model, sums):
    """Five steps with two updates each, a critic, and a checkpoint after the third."""
    return posttrain.train(
        {
            "algorithm.adv_estimator": "gae",
            "actor_rollout_ref.model.path": str(tiny_model),
            "data.train_files": str(sums["train"]),
            "data.train_batch_size": 8,
            "data.max_prompt_length": 32,
            "data.max_response_length": 6,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "actor_rollout_ref.actor.shuffle": True,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
            "trainer.total_training_steps": 5,
            "trainer.save_freq": 3,
            "trainer.export_hf": "none",
            "trainer.default_local_dir": str(tmp_path_factory.mktemp("runs")),
            "tracking.keep_batches": 4,
            "reward.num_workers": 1,
        },
        reward=right,
    )


def test_the_losses_of_a_replayed_step_are_those_of_the_run_to_the_bit(run):
    assert kept_steps(run.path / "batches") == [2, 3, 4, 5]  # the last four
    assert replayable(run.path) == {4: 3, 5: 3}  # 2 and 3 would need the batch of step 1
    seen: dict[str, torch.Tensor] = {}
    made = list(
        replay(run.path, find_start(run.path, 5), 5, lambda name, tensor: seen.setdefault(name, tensor.clone()))
    )
    assert [one.step for one in made] == [4, 5] and all(one.differing == {} for one in made)
    compared = {"policy_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"}
    for one in made:
        assert all(one.metrics[name] == run.metrics[one.step - 1][name] for name in compared)
    assert seen["batch/advantages"].shape[0] == 8
    assert any(name.startswith("actor/model.layers") for name in seen)
    assert seen["after/actor/model.norm.weight"].shape == (32,)


def test_a_step_that_cannot_be_replayed_is_answered_with_those_that_can(run, tmp_path, capsys):
    with pytest.raises(ReplayError, match="These can: 4 to 5"):
        find_start(run.path, 2)
    copy = shutil.copytree(run.path, tmp_path / "copy")
    shutil.rmtree(copy / "batches")
    assert main(["replay", str(copy), "5"]) == 2
    assert "tracking.keep_batches=-1" in capsys.readouterr().err


def test_the_command_says_whether_it_is_the_same_and_shows_tensors(run, tmp_path, capsys):
    hook = tmp_path / "hook.py"
    hook.write_text("def watch(name, tensor):\n    if name == 'batch/advantages':\n        print('seen', name)\n")
    assert main(["replay", str(run.path), "4", "--hook", str(hook)]) == 0
    shown = capsys.readouterr().out
    assert "step 4: policy_loss" in shown and "bit for bit" in shown and "seen batch/advantages" in shown


@pytest.mark.parametrize(
    "rollout",
    [
        {"name": "server", "server": {"url": ["http://127.0.0.1:9"]}},
        {"n_workers": 2, "tensor_model_parallel_size": 2},
    ],
    ids=["server", "two workers that only generate"],
)
def test_a_replay_needs_neither_the_servers_nor_the_rollout_workers_of_its_run(run, tmp_path, rollout):
    copy = shutil.copytree(run.path, tmp_path / "copy")
    facts = copy / "batches" / "replay.json"
    said = json.loads(facts.read_text())
    said["config"]["actor_rollout_ref"]["rollout"] |= rollout
    facts.write_text(json.dumps(said))
    (made,) = replay(copy, 3, 4)
    assert made.metrics["policy_loss"] == pytest.approx(run.metrics[3]["policy_loss"], rel=1e-5)
