"""QLoRA: adapters beside a base of 4 bits. Needs bitsandbytes; skipped where it is not installed."""

from __future__ import annotations

import pytest
import torch
from runs import metrics_of, run
from transformers import AutoModelForCausalLM

from posttrain.commands.export import export_checkpoint
from posttrain.config.model import ModelConfig
from posttrain.models.quantized import is_quantized
from posttrain.planning.counting import ModelBytes
from posttrain.planning.meta_models import actor_model
from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

bitsandbytes = pytest.importorskip("bitsandbytes")
KEYS = {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__model__quantization": "nf4"}
FAST = {"actor_rollout_ref__actor__optim__lr": 1e-2, "actor_rollout_ref__actor__use_kl_loss": True}


def held(weight: torch.Tensor) -> int:
    size = weight.numel() * weight.itemsize
    if is_quantized(weight):
        state = weight.quant_state
        size += state.absmax.numel() * state.absmax.itemsize + state.state2.absmax.numel() * 4
    return size


def test_two_steps_train_adapters_beside_4_bits_resume_and_export(tiny_model, sums, tmp_path, monkeypatch, capsys):
    trainers, fit = [], RayPPOTrainer.fit
    monkeypatch.setattr(RayPPOTrainer, "fit", lambda self: trainers.append(self) or fit(self))
    result = run(tiny_model, sums, tmp_path, **KEYS, **FAST)
    said = capsys.readouterr().out
    assert "held in 4 bits" in said and "general decoder" in said
    lines = metrics_of(result.path)
    assert len(lines) == 2 and lines[1]["kl_loss"] > 1e-6 and max(line["mismatch/logp_max"] for line in lines) < 1e-4

    module = trainers[0].actor_rollout_wg.worker.engine.module
    assert sum(map(is_quantized, module.parameters())) == 14
    planned = ModelBytes.of(
        actor_model(ModelConfig(path=str(tiny_model), lora_rank=4, quantization="nf4"), torch.float32)
    )
    assert planned.weights == sum(map(held, module.parameters()))

    ids = torch.tensor([[5, 9, 3, 77, 12]])
    checkpoint = result.path / "checkpoints" / "global_step_2"
    merged = AutoModelForCausalLM.from_pretrained(
        export_checkpoint(checkpoint, tmp_path / "merged"), dtype=torch.float32
    )
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, module(ids).logits, rtol=0, atol=1e-5)
    assert not hasattr(merged.config, "quantization_config")

    assert run(tiny_model, sums, tmp_path, **KEYS, **FAST, trainer__total_training_steps=3).steps == 3
    folder = {"trainer__export_hf": "last", "trainer__export_lora": "merged", "trainer__total_training_steps": 4}
    run(tiny_model, sums, tmp_path, **KEYS, **FAST, **folder)
    AutoModelForCausalLM.from_pretrained(result.path / "checkpoints" / "global_step_4" / "huggingface")
