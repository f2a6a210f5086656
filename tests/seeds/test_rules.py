"""Rules where the documents disagree (D-...) or are mistaken (M-...) that no other test carries by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.algorithms import AlgorithmError
from posttrain.protocol import DataProto
from posttrain.trainer.ppo.ray_trainer import compute_advantage
from posttrain.utils.reward_score import gsm8k_reward
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker


def batch(mask_width=3):
    return DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
            "response_mask": torch.ones(2, mask_width),
            "old_log_probs": torch.full((2, 3), -1.0),
            "ref_log_prob": torch.full((2, 3), -2.0),
        },
        non_tensors={"uid": np.array(["a", "a"], dtype=object)},
    )


def test_compute_advantage_returns_the_data_with_advantages_and_returns():
    data = batch()
    given = compute_advantage(data, adv_estimator="grpo")
    assert given is data
    assert data.batch["advantages"].shape == data.batch["returns"].shape == (2, 3)
    assert data.batch["advantages"][0, 0] > 0 > data.batch["advantages"][1, 0]


def test_other_names_of_log_probs_read_the_same_tensors():
    data = batch()
    assert torch.equal(data.batch["log_probs"], data.batch["old_log_probs"])
    assert torch.equal(data.batch["ref_log_probs"], data.batch["ref_log_prob"])
    assert ActorRolloutRefWorker.compute_log_probs is ActorRolloutRefWorker.compute_log_prob


def test_gsm8k_reward_is_a_name_of_ours():
    assert gsm8k_reward("so it is\n#### 1,234", "1234") == 1.0
    assert gsm8k_reward("openai/gsm8k", "#### 12", "... #### 13") == 0.0


def test_a_wrong_shape_is_answered_with_both_shapes():
    with pytest.raises(AlgorithmError, match=r"`token_level_rewards` has shape \(2, 3\) and `response_mask` \(2, 4\)"):
        compute_advantage(batch(mask_width=4), adv_estimator="grpo")


def test_the_example_has_the_file_name_of_the_document():
    script = Path(__file__).parents[2] / "examples" / "grpo_trainer" / "run_qwen3-8b.sh"
    assert script.is_file() and "posttrain.trainer.main_ppo" in script.read_text()


@pytest.mark.slow
def test_every_way_of_starting_makes_the_same_run(main_ppo, tiny_model, four_rows, tmp_path, monkeypatch):
    """The module, the module in torchrun's one process, `posttrain train` and `posttrain.train`: numbers and place."""
    from runs import metrics_of

    import posttrain
    from posttrain import cli

    keys = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": str(tiny_model),
        "data.train_files": str(four_rows),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 4,
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "trainer.total_training_steps": 1,
        "trainer.experiment_name": "run",
        "trainer.device": "cpu",
        "trainer.export_hf": "none",
        "reward.num_workers": 1,
        "custom_reward_function.path": str(Path(__file__).parent / "length_reward.py"),
    }
    spelled = [f"{key}={value}" for key, value in keys.items()]

    def under_torchrun() -> None:
        with monkeypatch.context() as patch:
            for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
                patch.setenv(name, value)
            main_ppo(*spelled)

    ways = {
        "module": lambda: main_ppo(*spelled),
        "torchrun": under_torchrun,
        "command": lambda: cli.main(["train", *spelled]),
        "python": lambda: posttrain.train(keys),
    }
    found = {}
    for name, start in ways.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        start()
        [line] = metrics_of(tmp_path / name / "outputs" / "posttrain" / "run")
        found[name] = line
    assert found["module"] == found["torchrun"] == found["command"] == found["python"]
    assert found["module"]["actor/grad_norm"] > 0
