"""Document 4, §5.1: GRPO with LoRA by the keys of `peft_config`, as written and as the example script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft.tuners.lora import LoraLayer
from seen import ROOT, metrics_of

from posttrain.cache import cache_folder
from posttrain.config import load_config

PEFT = "actor_rollout_ref.actor.peft_config"
COMMAND = (
    "algorithm.adv_estimator=grpo",
    f"{PEFT}.peft_type=lora",
    f"{PEFT}.lora_r=16",
    f"{PEFT}.lora_alpha=32",
    f'{PEFT}.target_modules=["q_proj","v_proj"]',
    "actor_rollout_ref.rollout.enable_lora=True",
)
SCRIPT = ROOT / "examples" / "grpo_trainer" / "run_qwen2_5-3b_gsm8k_grpo_lora.sh"
SIZES = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_response_length=8")


@pytest.fixture(scope="module")
def ran(brief_model: Path, parquet: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    from seen import chdir, see

    from posttrain.trainer import main_ppo

    own = [f"actor_rollout_ref.model.path={brief_model}", f"data.train_files={parquet['train']}", *SIZES]
    own += ["data.max_prompt_length=64", "trainer.total_training_steps=2", "trainer.device=cpu", "reward.num_workers=1"]
    with pytest.MonkeyPatch.context() as patch, chdir(tmp_path_factory.mktemp("work")):
        patch.setattr(sys, "argv", ["main_ppo", *COMMAND, *own])
        seen = see(main_ppo.cli)
        seen.trainer.run.path = seen.path.resolve()
        return seen


def test_the_command_runs_and_its_keys_are_the_canonical_ones(ran):
    assert ran.status == 0 and len(ran.steps) == 2
    model = ran.config["actor_rollout_ref"]["model"]
    assert (model["lora_rank"], model["lora_alpha"], model["target_modules"]) == (16, 32, ["q_proj", "v_proj"])
    assert ran.config["actor_rollout_ref"]["rollout"]["n"] == 5  # as D-02 has it: nobody set it


def test_rank_16_and_scale_2_on_exactly_the_two_kinds_of_modules(ran):
    module = ran.trainer.actor_rollout_wg.worker.engine.module.get_base_model()
    layers = {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "v_proj"} and len(layers) == 4
    assert {part.lora_A["default"].weight.shape[0] for part in layers.values()} == {16}
    assert {part.scaling["default"] for part in layers.values()} == {2.0}


def test_the_rollout_goes_through_the_adapters(ran):
    """After the first update the adapters count; rollout and trainer still give the same log-probs."""
    batch = ran.trainer.batches[1]
    real = batch.batch["response_mask"].bool()
    gap = (batch.batch["rollout_log_probs"] - ran.trainer.log_probs_before_update[1]).abs()[real]
    assert float(gap.max()) < 1e-5


@pytest.mark.slow
def test_the_script_sets_the_documents_keys_and_its_small_form_runs(brief_model: Path, tmp_path: Path, forked):
    from posttrain.data.recipes.recipe import prepare
    from posttrain.data.recipes.tasks import GSM8K

    text = SCRIPT.read_text()
    assert all(key.partition("=")[0] in text for key in COMMAND) and os.access(SCRIPT, os.X_OK)
    resolved = load_config(list(COMMAND))
    assert resolved.value("actor_rollout_ref.model.lora_rank") == 16
    raw = [{"question": f"{i} + {i}?", "answer": f"Twice {i}.\n#### {2 * i}"} for i in range(8)]
    (tmp_path / "raw").mkdir()
    for split, rows in (("train", raw), ("test", raw[:2])):
        (tmp_path / "raw" / f"{split}.json").write_text(json.dumps(rows))
    prepare(GSM8K, tmp_path / "raw", tmp_path / "home/data/gsm8k")
    own = [f"actor_rollout_ref.model.path={brief_model}", "trainer.device=cpu", "reward.num_workers=1", *SIZES]
    own += ["data.max_prompt_length=256", "data.val_files=null", "trainer.total_training_steps=1"]
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHON": forked.python, "OMP_NUM_THREADS": "1"}
    environment["POSTTRAIN_CACHE"] = str(cache_folder())  # the compiled kernels
    done = subprocess.run(
        ["bash", str(SCRIPT), *own], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "outputs" / "verl_grpo_example" / "qwen2_5_3b_grpo_lora"
    assert [line["step"] for line in metrics_of(folder)] == [1]
    assert (folder / "checkpoints" / "global_step_1" / "huggingface" / "adapter_model.safetensors").is_file()
