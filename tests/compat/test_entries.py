"""verl's commands run posttrain's programs, and what is not given says what to use."""

import importlib
import json
import runpy
import sys

import pytest

from posttrain.data.rows import load_rows

RUN = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    "data.train_batch_size=2",
    "data.max_prompt_length=32",
    "data.max_response_length=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.total_training_steps=1",
    "trainer.device=cpu",
    "trainer.export_hf=none",
    "trainer.save_freq=-1",
    "reward.num_workers=1",
    "trainer.project_name=p",
    "trainer.experiment_name=e",
]


def command(monkeypatch, module, *arguments):
    """`python -m module arguments` in this process; gives its exit status."""
    monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    return end.value.code


REWARD = """
from verl.utils.reward_score import default_compute_score

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    known = default_compute_score("openai/gsm8k", solution_str, ground_truth)
    return {"score": known + len(solution_str) % 2, "known": known}
"""
ALGORITHM = """
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

@register_adv_est("as_it_is")
def compute(token_level_rewards, response_mask, index, config=None, **kwargs):
    scores = token_level_rewards.sum(-1, keepdim=True) * response_mask * config.get("my_scale", 1.0)
    return scores, scores

@register_policy_loss("mine")
def lose(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, **kwargs):
    loss = agg_loss(-advantages * log_prob, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/my_beta": config.policy_loss.my_beta + config.get("my_gamma"), "actor/adv": advantages.max()}
"""


def test_main_ppo_trains_with_a_reward_file_and_an_estimator_written_for_verl(
    monkeypatch, tmp_path, tiny_model, sums, capfd
):
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "my_estimator.py").write_text(ALGORITHM)
    monkeypatch.chdir(tmp_path)
    files = [f"actor_rollout_ref.model.path={tiny_model}", f"data.train_files={sums['train']}"]
    own = ["custom_reward_function.path=my_reward.py", "algorithm.adv_estimator=as_it_is"]
    own += ["actor_rollout_ref.actor.policy_loss.loss_mode=mine", "+algorithm.my_scale=0", "+data.seed=3"]
    own += ["+actor_rollout_ref.actor.policy_loss.my_beta=2.5", "+actor_rollout_ref.actor.my_gamma=1"]
    out = f"trainer.default_local_dir={tmp_path}"
    status = command(monkeypatch, "verl.trainer.main_ppo", *RUN[1:], *files, *own, out)
    assert status == 0, capfd.readouterr()
    [metrics] = tmp_path.rglob("metrics.jsonl")
    [line] = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert line["reward/known/mean"] == 0 and line["reward_mean"] > 0
    assert line["actor/my_beta"] == 3.5 and line["actor/adv"] == 0  # added settings reach both functions
    assert "Loaded my_estimator.py" in capfd.readouterr().out


def test_an_added_setting_that_nobody_reads_is_unknown(monkeypatch, capfd):
    assert command(monkeypatch, "verl.trainer.main_ppo", *RUN, "+algorithm.my_scale=0") == 2
    assert "Unknown key `algorithm.my_scale`" in capfd.readouterr().err
    keys = ["algorithm.adv_estimator=mine", "+data.my_key=1", "+algorithm.use_pf_ppo=True"]
    assert command(monkeypatch, "verl.trainer.main_ppo", *RUN[1:], *keys) == 2
    said = capfd.readouterr().err
    assert "Unknown key `data.my_key`" in said and "PF-PPO" in said


MANAGER = """
import torch
from verl.workers.reward_manager import AbstractRewardManager, register

@register("evens")
class Evens(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **kwargs):
        self.tokenizer = tokenizer

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        rewards[:, 0] = (data.batch["responses"].sum(-1) % 2).float()
        return {"reward_tensor": rewards, "reward_extra_info": {"even": rewards.sum(-1).tolist()}}
"""


ALL_AT_ONCE = """
def score_all(data_sources, solution_strs, ground_truths, extra_infos, bonus=None):
    count = len(solution_strs)
    assert len(data_sources) == len(ground_truths) == len(extra_infos) == count
    return [{"score": count + bonus.each, "of": count}] * count
"""


def test_main_ppo_scores_by_a_reward_manager_that_a_file_registers(monkeypatch, tmp_path, tiny_model, sums, capfd):
    from verl.workers.reward_manager import registry

    monkeypatch.setattr(registry, "REWARD_MANAGER_REGISTRY", dict(registry.REWARD_MANAGER_REGISTRY))
    (tmp_path / "my_manager.py").write_text(MANAGER)
    monkeypatch.chdir(tmp_path)
    files = [f"actor_rollout_ref.model.path={tiny_model}", f"data.train_files={sums['train']}"]
    files.append(f"trainer.default_local_dir={tmp_path}")
    named = ["reward_model.reward_manager=evens", "actor_rollout_ref.model.external_lib=my_manager.py"]
    assert command(monkeypatch, "verl.trainer.main_ppo", *RUN, *files, *named) == 0, capfd.readouterr()
    [metrics] = tmp_path.rglob("metrics.jsonl")
    line = json.loads(metrics.read_text())
    assert line["reward/even/mean"] == line["reward_mean"]
    (tmp_path / "scores.py").write_text(ALL_AT_ONCE)
    batch = ["reward_model.reward_manager=batch", "custom_reward_function.path=scores.py", "trainer.experiment_name=b"]
    batch += ["custom_reward_function.name=score_all", "+reward_model.reward_kwargs.bonus.each=0.5"]
    assert command(monkeypatch, "verl.trainer.main_ppo", *RUN, *files, *batch) == 0, capfd.readouterr()
    [metrics] = (tmp_path / "p" / "b").rglob("metrics.jsonl")
    line = json.loads(metrics.read_text())
    assert line["reward/of/mean"] == 4 and line["reward_mean"] == 4.5
    assert command(monkeypatch, "verl.trainer.main_ppo", *RUN, *files, "reward_model.reward_manager=odds") == 2
    assert "Unknown reward manager: odds" in capfd.readouterr().err


def test_main_ppo_shows_its_settings_and_names_mistakes(monkeypatch, capsys):
    assert command(monkeypatch, "verl.trainer.main_ppo", "--cfg", "job", *RUN) == 0
    assert "adv_estimator: grpo" in capsys.readouterr().out
    assert command(monkeypatch, "verl.trainer.main_ppo", "data.trian_batch_size=2") == 2
    assert "data.train_batch_size" in capsys.readouterr().err


def test_generation_and_evaluation_speak_verls_keys(monkeypatch, tmp_path, tiny_model, sums, capsys):
    rows = json.loads(sums["test"].read_text())[:2]
    (tmp_path / "two.json").write_text(json.dumps(rows))
    out = tmp_path / "out.parquet"
    keys = [f"model.path={tiny_model}", f"data.path={tmp_path / 'two.json'}", f"data.output_path={out}"]
    sizes = ["data.n_samples=2", "rollout.response_length=3", "trainer.device=cpu"]
    assert command(monkeypatch, "verl.trainer.main_generation", *keys, *sizes) == 0
    assert [len(row["responses"]) for row in load_rows(str(out)).rows] == [2, 2]
    assert command(monkeypatch, "verl.trainer.main_eval", f"data.path={out}") == 0
    assert "test_score/" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["verl.trainer.sft_trainer", "verl.trainer.fsdp_sft_trainer"])
def test_supervised_training_under_both_names(monkeypatch, capsys, module):
    assert command(monkeypatch, module, "--cfg", "job") == 0
    assert "micro_batch_size_per_gpu" in capsys.readouterr().out


def test_what_is_missing_says_what_to_use():
    with pytest.raises(ModuleNotFoundError, match=r"`verl.models`. Models are loaded by transformers"):
        importlib.import_module("verl.models.registry")
    with pytest.raises(ImportError, match=r"does not give `verl.trainer.ppo.core_algos.compute_magic`"):
        from verl.trainer.ppo.core_algos import compute_magic  # noqa: F401
    core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
    assert not hasattr(core_algos, "compute_magic")
    with pytest.raises(AttributeError, match="compute_magic"):
        _ = core_algos.compute_magic


def test_one_step_off_policy_is_a_setting_and_needs_workers_that_only_generate(monkeypatch, capfd):
    for module in ("verl.experimental.one_step_off_policy.main_ppo", "recipe.one_step_off_policy.main_ppo"):
        assert command(monkeypatch, module, *RUN) == 2
        assert "set actor_rollout_ref.rollout.n_workers=1 or more, which only generate" in capfd.readouterr().err
    main = importlib.import_module("verl.experimental.one_step_off_policy.main_ppo")
    given = ["--config-path=config", "--config-name='one_step_off_ppo_trainer.yaml'", "rollout.nnodes=1"]
    assert main.settings(given) == ["trainer.one_step_off=True", "rollout.nnodes=1"]
    assert main.settings(["--config-path=mine"]) == ["trainer.one_step_off=True", "--config-path=mine"]


def test_fully_async_policy_is_a_setting_with_verls_defaults_unless_they_are_set(monkeypatch, capfd):
    for module in (
        "verl.experimental.fully_async_policy.fully_async_main",
        "recipe.fully_async_policy.fully_async_main",
    ):
        assert command(monkeypatch, module, *RUN) == 2
        assert "set actor_rollout_ref.rollout.n_workers=1 or more, which only generate" in capfd.readouterr().err
    main = importlib.import_module("verl.experimental.fully_async_policy.fully_async_main")
    given = ["--config-name=fully_async_ppo_trainer.yaml", "async_training.staleness_threshold=2", "rollout.nnodes=1"]
    *defaults, staleness, layout = main.settings(given)
    assert (staleness, layout) == tuple(given[1:]) and "async_training.trigger_parameter_sync_step=4" in defaults
    assert not any("staleness" in one for one in defaults)
