"""The example scripts: what they set is what the documents show, and a small form of each runs to its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from private_hub import private_hub
from seen import ROOT, metrics_of

from posttrain.cache import cache_folder
from posttrain.config import load_config

QWEN3_8B = ROOT / "examples" / "grpo_trainer" / "run_qwen3-8b.sh"
DOCUMENT_0 = {  # §2.2
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    "data.train_files": "$HOME/data/gsm8k/train.parquet",
    "data.val_files": "$HOME/data/gsm8k/test.parquet",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 1024,
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.rollout.n": 5,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 15,
    "trainer.project_name": "verl_grpo_example",
    "trainer.experiment_name": "qwen3_8b_grpo",
}


def at_home(folder: Path, python: str = sys.executable) -> dict[str, str]:
    """The environment of somebody who lives there; what is made once per machine is not made again."""
    own = {"HOME": str(folder), "POSTTRAIN_CACHE": str(cache_folder()), "PYTHON": python}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


def test_the_script_sets_the_22_keys_of_the_document_in_one_unbroken_command(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    command = QWEN3_8B.read_text().partition("main_ppo")[2]
    assert "#" not in command and not re.search(r"\\[ \t]+\n|\n\s*\n", command)
    assert command.rstrip().endswith('"$@"')
    arguments = [os.path.expandvars(text.replace('"', "")) for text in re.findall(r"\S+=\S+", command)]
    resolved = load_config(arguments)
    wanted = {k: os.path.expandvars(v) if isinstance(v, str) else v for k, v in DOCUMENT_0.items()}
    assert len(arguments) == len(wanted) == 22
    assert {key: resolved.value(key) for key in wanted} == wanted


@pytest.mark.slow
def test_the_script_trains_two_small_steps_and_the_hubs_token_is_written_nowhere(brief_model: Path, tmp_path: Path):
    """Added settings win; the model comes from a hub that gives it to whoever shows the token."""
    from posttrain.data.recipes.recipe import prepare
    from posttrain.data.recipes.tasks import GSM8K

    raw = [{"question": f"{i} + {i}?", "answer": f"Twice {i}.\n#### {2 * i}"} for i in range(8)]
    (tmp_path / "raw").mkdir()
    for split, rows in (("train", raw), ("test", raw[:2])):
        (tmp_path / "raw" / f"{split}.json").write_text(json.dumps(rows))
    prepare(GSM8K, tmp_path / "raw", tmp_path / "home/data/gsm8k")
    sizes = ["data.train_batch_size=4", "data.max_prompt_length=256", "data.max_response_length=8"]
    sizes += ["actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    run = ["actor_rollout_ref.model.path=me/private", "trainer.device=cpu", "reward.num_workers=1"]
    run += ["trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]
    run += ["actor_rollout_ref.rollout.name=native"]
    token = "hf_neverToBeSeenAnywhere"
    with private_hub(brief_model, "me/private", token) as (address, refused):
        own = {"HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
        own |= {"TRANSFORMERS_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        ran = subprocess.run(
            ["bash", str(QWEN3_8B), *run, *sizes, "trainer.total_training_steps=2"],
            cwd=tmp_path,
            env={**at_home(tmp_path / "home"), **own},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ran.returncode == 0 and refused == [], ran.stdout + ran.stderr + str(refused)
    written = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    assert len(written) > 5 and not any(token.encode() in path.read_bytes() for path in written)
    assert token not in ran.stdout + ran.stderr
    folder = tmp_path / "outputs" / "verl_grpo_example" / "qwen3_8b_grpo"
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "val/gsm8k/mean@1" in lines[0] and lines[1]["actor/optimizer_steps"] == 2.0 and "kl_loss" in lines[1]
    assert (folder / "checkpoints" / "global_step_2" / "manifest.json").is_file()


PPO_RM, PPO_LLM = (ROOT / "examples" / "ppo_trainer" / f"run_{name}.sh" for name in ("qwen2-7b_rm", "deepseek7b_llm"))
DOCUMENT_4 = {  # §3.1
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 0.95,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.kl_coef": 0.02,
    "algorithm.kl_ctrl.target_kl": 0.01,
    "actor_rollout_ref.model.path": "Qwen/Qwen2-7B-Instruct",
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.ppo_epochs": 4,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.entropy_coeff": 0.01,
    "critic.optim.lr": 1e-5,
    "critic.ppo_epochs": 4,
    "critic.cliprange_value": 0.2,
    "reward_model.enable": True,
    "reward_model.model.path": "weqweasdas/RM-Gemma-2B",
    "reward_model.micro_batch_size_per_gpu": 16,
    "trainer.critic_warmup": 10,
    "trainer.total_epochs": 1,
}


@pytest.mark.parametrize("script", [PPO_RM, PPO_LLM], ids=lambda script: script.stem)
def test_the_ppo_scripts_are_unbroken_commands_with_the_documents_keys(script, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    command = script.read_text().partition("main_ppo")[2]
    assert "#" not in command and not re.search(r"\\[ \t]+\n|\n\s*\n", command)
    assert command.rstrip().endswith('"$@"')
    resolved = load_config([os.path.expandvars(text.replace('"', "")) for text in re.findall(r"\S+=\S+", command)])
    assert resolved.value("algorithm.adv_estimator") == "gae"
    if script is PPO_RM:
        assert {key: resolved.value(key) for key in DOCUMENT_4} == DOCUMENT_4 and len(DOCUMENT_4) == 20


@pytest.mark.slow
@pytest.mark.parametrize("script", [PPO_RM, PPO_LLM], ids=lambda script: script.stem)
def test_the_ppo_scripts_train_two_small_steps_with_a_critic(script, brief_model: Path, tmp_path: Path, forked):
    from reward_models import other_tokenizer, write_reward_model

    from posttrain.data.recipes.recipe import prepare
    from posttrain.data.recipes.tasks import GSM8K

    raw = [{"question": f"{i} + {i}?", "answer": f"Twice {i}.\n#### {2 * i}"} for i in range(8)]
    (tmp_path / "raw").mkdir()
    for split, rows in (("train", raw), ("test", raw[:2])):
        (tmp_path / "raw" / f"{split}.json").write_text(json.dumps(rows))
    prepare(GSM8K, tmp_path / "raw", tmp_path / "home/data/gsm8k")
    small = ["data.train_batch_size=4", "data.max_prompt_length=256", "data.max_response_length=8"]
    small += [f"actor_rollout_ref.model.path={brief_model}", "trainer.device=cpu", "reward.num_workers=1"]
    small += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=2"]
    if script is PPO_RM:
        scorer = write_reward_model(tmp_path / "rm", tokenizer=other_tokenizer())
        small += [f"reward_model.model.path={scorer}", "trainer.critic_warmup=1"]
    else:
        small += [f"critic.model.path={brief_model}"]
    environment = at_home(tmp_path / "home", forked.python)
    command = ["bash", str(script), *small]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    name = "qwen2_7b_rm" if script is PPO_RM else "deepseek_llm_7b"
    folder = tmp_path / "outputs" / "verl_ppo_example" / name
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == [0, 1, 2] and "val/gsm8k/mean@1" in lines[0]
    assert (folder / "checkpoints" / "global_step_2" / "critic").is_dir()
    if script is PPO_RM:
        assert [line["critic/optimizer_steps"] for line in lines[1:]] == [8.0, 8.0]  # 4 passes over 2 mini-batches
        assert lines[1].get("actor/optimizer_steps") is None and lines[2]["actor/optimizer_steps"] == 8.0
        assert all("reward_model/mean" in line for line in lines[1:])
    else:
        assert all(line["critic/optimizer_steps"] == line["actor/optimizer_steps"] == 2.0 for line in lines[1:])
        assert not any("reward_model/mean" in line for line in lines)
