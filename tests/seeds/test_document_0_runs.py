"""Document 0, parts 3 to 5: the named files are there; what a run does in which order, says and records."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import subprocess
import sys

import pytest
import torch
from seen import ROOT, groups, parity_reward, relative_to_group, see, settings

import posttrain
from posttrain.algorithms.registry import ADV_ESTIMATORS
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.config import ConfigError, load_config
from posttrain.protocol import DataProto

MODEL = "actor_rollout_ref.model"


# -- files and names


def test_the_entrys_help_works_from_any_folder(tmp_path):
    command = [sys.executable, "-m", "posttrain.trainer.main_ppo", "--help"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert shown.returncode == 0 and "algorithm.adv_estimator" in shown.stdout, shown.stderr


@pytest.mark.parametrize(
    ("module", "names"),
    [
        pytest.param("trainer.main_ppo", "main run_ppo TaskRunner", id="S0-46 S0-152"),
        pytest.param("trainer.ppo.ray_trainer", "RayPPOTrainer compute_advantage", id="S0-62 S0-75 S0-77"),
        pytest.param(
            "trainer.ppo.core_algos",
            "compute_grpo_outcome_advantage AdvantageEstimator register_adv_est register_policy_loss",
            id="S0-63",
        ),
        pytest.param("trainer.config.algorithm", "AlgorithmConfig", id="S0-65"),
        pytest.param("trainer.constants_ppo", "PPO_ENVIRONMENT", id="S0-66 module"),
        pytest.param(
            "workers.fsdp_workers",
            "ActorRolloutRefWorker AsyncActorRolloutRefWorker CriticWorker",
            id="S0-67 S0-94 S0-95",
        ),
        pytest.param("workers.engine", "TrainEngine FSDPEngine", id="S0-68"),
        pytest.param("protocol", "DataProto", id="S0-69"),
        pytest.param("workers.actor.dp_actor", "DataParallelPPOActor", id="S0-116"),
    ],
)
def test_the_named_module_gives_the_named_things_and_opens_with_what_it_is(module, names):
    found = importlib.import_module(f"posttrain.{module}")
    assert all(hasattr(found, name) for name in names.split())
    assert found.__doc__ and found.__doc__.strip()


def test_DataProto_is_one_class_under_two_addresses():
    assert posttrain.DataProto is DataProto


def test_a_runner_of_ones_own_has_its_run_called():
    from posttrain.trainer.main_ppo import TaskRunner, run_ppo

    class Mine(TaskRunner):
        def run(self, config):
            return "mine", config

    assert run_ppo({"a": 1}, task_runner_class=Mine) == ("mine", {"a": 1})


def test_an_exception_inside_the_runner_reaches_the_caller():
    from posttrain.trainer.main_ppo import TaskRunner, run_ppo

    class Failing(TaskRunner):
        def run(self, config):
            raise ZeroDivisionError("inside the runner")

    with pytest.raises(ZeroDivisionError, match="inside the runner"):
        run_ppo({}, task_runner_class=Failing)


def environment_reward(data_source, solution_str, ground_truth, extra_info=None):
    return float(os.environ["POSTTRAIN_TEST_OF_CONSTANTS"])


def test_a_constant_of_the_runs_environment_is_what_a_worker_process_sees(small, monkeypatch):
    from posttrain.trainer.constants_ppo import PPO_ENVIRONMENT

    name = "POSTTRAIN_TEST_OF_CONSTANTS"
    monkeypatch.setenv(name, "1")
    monkeypatch.delenv(name)  # so that what the run sets is taken away after the test
    monkeypatch.setitem(PPO_ENVIRONMENT, name, "0.75")
    seen = small(reward=environment_reward)
    assert {row["score"] for row in seen.samples()} == {0.75}


def test_the_start_names_its_stages_in_order(main_ppo, brief_model, four_rows, monkeypatch):
    from posttrain.trainer import main_ppo as entry

    calls, plain_start, plain_run = [], entry.run_ppo, entry.TaskRunner.run
    monkeypatch.setattr(entry, "run_ppo", lambda config: calls.append("run_ppo") or plain_start(config))
    monkeypatch.setattr(entry.TaskRunner, "run", lambda self, config: calls.append("run") or plain_run(self, config))
    keys = ["algorithm.adv_estimator=grpo", f"{MODEL}.path={brief_model}", f"data.train_files={four_rows}"]
    keys += ["data.max_prompt_length=64", "data.max_response_length=4", "trainer.experiment_name=e"]
    main_ppo(*keys, "trainer.total_training_steps=1", "actor_rollout_ref.actor.use_kl_loss=True")
    seen = main_ppo(*keys, "trainer.total_training_steps=2", "actor_rollout_ref.actor.use_kl_loss=True")
    assert calls == ["run_ppo", "run"] * 2
    stages = (
        "Configuration: posttrain/trainer/config/ppo_trainer.yaml and the command line",
        "One worker: Ray is not needed",
        "Creating workers on cpu: actor, rollout, reference (one process, no Ray needed)",
        "Resumed from ",
        "step 2/2",
    )
    places = [seen.console.index(stage) for stage in stages]
    assert places == sorted(places)


@pytest.mark.parametrize("row", ["S0-100 algorithm", "S0-101 actor_rollout_ref", "S0-102 data", "S0-103 trainer"])
def test_the_section_is_in_the_resolved_tree_and_in_the_runs_file(grpo, row):
    section = row.split()[1]
    assert load_config(["trainer.seed=2"]).config.to_dict()[section]
    assert grpo.config[section]
    if section == "actor_rollout_ref":
        assert {"model", "actor", "rollout", "ref"} <= set(grpo.config[section])


# -- fit


def test_each_step_shows_its_stages_in_order(grpo):
    for line in grpo.steps:
        stages = [name.removeprefix("timing_s/") for name in line if name.startswith("timing_s/")]
        assert stages[:6] == ["gen", "reward", "old_log_prob", "ref", "adv", "update_actor"]
        assert all(line[f"timing_s/{stage}"] > 0 for stage in stages)


def test_a_checkpoint_is_loaded_before_the_first_generation(tiny_model, parquet, tmp_path):
    def train(steps: int):
        chosen = settings(tiny_model, parquet, tmp_path, trainer__total_training_steps=steps)
        return see(lambda: posttrain.train(chosen, reward=parity_reward)).trainer

    assert train(2).calls == ["generate after 0", "generate after 1"]
    assert train(3).calls == ["resume at 2", "generate after 2"]


@pytest.mark.parametrize("before", [True, False])
def test_validation_before_training_is_optional(small, parquet, before):
    seen = small(data__val_files=str(parquet["test"]), trainer__val_before_train=before)
    at_0 = [line for line in seen.lines if line["step"] == 0]
    assert [any(name.startswith("val/") for name in line) for line in at_0] == [True] * before


def test_every_step_has_a_line_and_validation_comes_at_its_frequency(small, parquet):
    seen = small(data__val_files=str(parquet["test"]), trainer__test_freq=2, trainer__total_training_steps=5)
    assert [line["step"] for line in seen.lines] == [0, 1, 2, 3, 4, 5]
    validated = [line["step"] for line in seen.lines if "val/math_reasoning/mean@1" in line]
    assert validated == [0, 2, 4, 5]


@pytest.mark.parametrize(("freq", "saved"), [(-1, [3]), (2, [2, 3]), (50, [3])])
def test_the_last_step_has_a_checkpoint_that_loads(small, freq, saved):
    seen = small(trainer__save_freq=freq, trainer__total_training_steps=3)
    manager = CheckpointManager(seen.path / "checkpoints")
    assert sorted(int(path.name[12:]) for path in (seen.path / "checkpoints").glob("global_step_*")) == saved
    newest = manager.newest()
    assert newest is not None and manager.load_state(newest)["step"] == 3
    state = seen.trainer.actor_rollout_wg.worker.engine.state.tensors()
    loaded = {name: torch.full_like(tensor, 7) for name, tensor in state.items()}
    manager.load_tensors(newest, "actor", loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items()) and len(state) > 30


# -- what a run says and records


def test_scores_and_advantages_of_a_run_are_those_of_the_formula(grpo):
    for step in (1, 2):
        samples = grpo.samples(step)
        assert len([row["score"] for row in samples if row["score"] is not None]) == 20
        for rows in groups(samples).values():
            wanted = relative_to_group([row["score"] for row in rows])
            assert len(rows) == 5
            for row, value in zip(rows, wanted, strict=True):
                assert row["score"] == pytest.approx(parity_reward("", row["response"], ""))
                assert row["advantages"] == pytest.approx([value] * len(row["response_ids"]), abs=1e-5)


def test_kl_in_the_reward_works_with_both_estimators_and_twice_only_on_request(small):
    gae = small(algorithm__adv_estimator="gae", algorithm__use_kl_in_reward=True)
    grpo = small(algorithm__use_kl_in_reward=True)
    for seen in (gae, grpo):
        batch = seen.trainer.batches[1].batch
        kl = batch["old_log_probs"] - batch["ref_log_prob"]
        wanted = batch["token_level_scores"] - 0.001 * kl * batch["response_mask"]
        assert torch.allclose(batch["token_level_rewards"], wanted, atol=1e-7) and kl.abs().max() > 1e-4
    assert "note: KL is in the reward under grpo" in grpo.log and "KL is in the reward" not in gae.log
    with pytest.raises(ConfigError, match="it would count twice"):
        small(algorithm__use_kl_in_reward=True, actor_rollout_ref__actor__use_kl_loss=True)


MINE = """
from posttrain.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

@register_adv_est("printing_grpo", compares_group=True)
def printing(token_level_rewards, response_mask, index, **kwargs):
    scores = token_level_rewards.sum(-1)
    print("group mean", round(float(scores.mean()), 6), "of", len(set(index)), "groups")
    return compute_grpo_outcome_advantage(token_level_rewards, response_mask, index)
"""


def test_a_print_in_ones_own_estimator_is_in_console_and_log(small, tmp_path):
    file = tmp_path / "my_estimator.py"
    file.write_text(MINE)
    try:
        seen = small(algorithm__adv_estimator="printing_grpo", actor_rollout_ref__model__external_lib=str(file))
    finally:
        ADV_ESTIMATORS.pop("printing_grpo", None)
    for line in seen.steps:
        printed = f"group mean {round(line['reward_mean'], 6)} of 4 groups"
        assert printed in seen.console.splitlines() and printed in seen.log.splitlines()
    assert "Using advantage estimator: printing_grpo" in seen.log


def test_a_print_added_to_the_built_in_function_is_seen_and_group_mean_and_deviation_are_metrics(small, monkeypatch):
    built_in = ADV_ESTIMATORS["grpo"]

    @functools.wraps(built_in.function)
    def loud(*args, **named):
        print("looking at", len(named["index"]), "advantages")
        return built_in.function(*args, **named)

    monkeypatch.setitem(ADV_ESTIMATORS, "grpo", dataclasses.replace(built_in, function=loud))
    seen = small(trainer__seed=143)
    assert seen.console.splitlines().count("looking at 20 advantages") == 2
    assert seen.log.splitlines().count("looking at 20 advantages") == 2
    names = ("reward_mean", "reward_std", "groups/reward_mean/min", "groups/reward_mean/max", "groups/reward_std/max")
    assert all(name in line for line in seen.steps for name in names)
