"""Runs that train adapters of a mixture's experts: they learn, resume, export, and generate."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from runs import metrics_of, run
from test_runs_of_mixtures import SHAPE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from posttrain import cli
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.commands.export import adapted_model, stored_lora
from posttrain.config.model import ModelConfig
from posttrain.models.embedded import byte_tokenizer
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

MODEL = "actor_rollout_ref__model__"
EXPERTS = {f"{MODEL}lora_rank": 4, f"{MODEL}target_modules": ["all-linear", "experts"], "trainer__save_freq": 1}
EXPERTS |= {"actor_rollout_ref__actor__optim__lr": 1e-2, "actor_rollout_ref__actor__use_kl_loss": True}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("mixture"), byte_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=len(tokenizer), **ends, **SHAPE)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(mixture, sums, tmp_path_factory):
    """A run of three steps with a checkpoint after each."""
    trainers, fit = [], RayPPOTrainer.fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayPPOTrainer, "fit", lambda self: trainers.append(self) or fit(self))
        out = tmp_path_factory.mktemp("experts")
        result = run(mixture, sums, out, trainer__export_hf="last", trainer__total_training_steps=3, **EXPERTS)
    module = trainers[0].actor_rollout_wg.worker.engine.module
    return SimpleNamespace(path=result.path, module=module, checkpoints=result.path / "checkpoints", base=mixture)


@torch.no_grad()
def logits(model, base: Path) -> torch.Tensor:
    return model(torch.tensor([AutoTokenizer.from_pretrained(base).encode("12 + 30 = ?")])).logits


def plain(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_rollout_and_trainer_agree_and_the_adapters_of_experts_are_trained(made):
    lines = metrics_of(made.path)
    assert len(lines) == 3 and all(line["mismatch/logp_max"] < 1e-4 for line in lines)
    assert abs(lines[0]["kl_loss"]) < 1e-6 < lines[2]["kl_loss"]  # the reference is the base without adapters
    moved = {name: float(w.detach().abs().max()) for name, w in made.module.named_parameters() if "lora_B" in name}
    assert sum(".experts." in name for name in moved) == 4
    assert all(most > 1e-3 for most in moved.values())


def test_a_run_that_was_cut_short_resumes_bitwise(made, mixture, sums, tmp_path):
    run(mixture, sums, tmp_path, trainer__total_training_steps=2, **EXPERTS)
    run(mixture, sums, tmp_path, trainer__total_training_steps=3, **EXPERTS)
    assert weights(tmp_path / "test" / "run" / "checkpoints" / "global_step_3", tmp_path / "mine") == weights(
        made.checkpoints / "global_step_3", tmp_path / "straight"
    )


def weights(checkpoint: Path, out: Path) -> bytes:
    assert cli.main(["export", str(checkpoint), str(out), "--adapter"]) == 0
    return (out / "adapter_model.safetensors").read_bytes()


def test_peft_loads_the_exported_adapter_and_transformers_the_merged_model(made, tmp_path):
    expected = logits(made.module, made.base)
    assert float((expected - logits(plain(made.base), made.base)).abs().max()) > 1e-3
    newest = made.checkpoints / "global_step_3"
    stored = json.loads((newest / "huggingface" / "adapter_config.json").read_text())
    assert sorted(stored["target_parameters"]) == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    theirs = PeftModel.from_pretrained(plain(made.base), str(newest / "huggingface"))
    torch.testing.assert_close(logits(theirs, made.base), expected, rtol=0, atol=1e-5)
    assert cli.main(["export", str(newest), str(tmp_path / "merged")]) == 0
    torch.testing.assert_close(logits(plain(tmp_path / "merged"), made.base), expected, rtol=0, atol=1e-5)


def test_a_run_starts_from_the_exported_adapter(made, sums, tmp_path, capsys):
    adapter = made.checkpoints / "global_step_3" / "huggingface"
    more = {f"{MODEL}lora_adapter_path": str(adapter), "actor_rollout_ref__actor__use_kl_loss": True}
    result = run(made.base, sums, tmp_path, trainer__total_training_steps=1, **more)
    assert "have adapters for 8 experts of each layer: 0." in capsys.readouterr().out
    (line,) = metrics_of(result.path)
    assert line["kl_loss"] > 1e-6 and line["mismatch/logp_max"] < 1e-4


def test_generation_from_a_checkpoint_has_the_adapters_of_its_experts(made):
    manager, newest = CheckpointManager(made.checkpoints), made.checkpoints / "global_step_3"
    lora = stored_lora(manager, newest)
    place = {"dtype": torch.float32, "device": torch.device("cpu")}
    model = adapted_model(manager, newest, lora, ModelConfig(path=str(made.base)), **place, advice="")
    expected = logits(made.module, made.base)
    torch.testing.assert_close(logits(model, made.base), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits(model.merge_and_unload(), made.base), expected, rtol=0, atol=1e-5)
