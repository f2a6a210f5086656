"""QLoRA in supervised runs. Needs bitsandbytes; skipped where it is not installed."""

from __future__ import annotations

import pytest
import torch
from lora_tools import logits, plain, scores, started, watched
from sft_runs import metrics_of, reward_model, sft
from transformers import AutoModelForSequenceClassification

from posttrain.commands.export import export_checkpoint
from posttrain.models.quantized import is_quantized

bitsandbytes = pytest.importorskip("bitsandbytes")
KEYS = {"model__lora_rank": 4, "model__quantization": "nf4", "optim__lr": 1e-2}


def test_sft_trains_adapters_beside_4_bits_resumes_and_exports(tiny_model, tmp_path, capsys):
    run, module = watched(sft, tiny_model, tmp_path, **KEYS)
    said = capsys.readouterr().out
    total = sum(weight.numel() for weight in plain(tiny_model).parameters())
    adapters = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    assert f"{total + adapters:,} parameters, {adapters:,} of them trained" in said and "in 4 bits (nf4)" in said
    assert sum(map(is_quantized, module.parameters())) == 14
    lines = metrics_of(run.path)
    assert lines[1]["train/loss"] < lines[0]["train/loss"]
    checkpoint = run.path / "checkpoints" / "global_step_2"
    merged = plain(export_checkpoint(checkpoint, tmp_path / "merged"))
    torch.testing.assert_close(logits(merged), logits(module), rtol=0, atol=1e-5)
    assert not hasattr(merged.config, "quantization_config")
    adapter = export_checkpoint(checkpoint, tmp_path / "adapter", adapter=True)
    again = started(sft, tiny_model, tmp_path, model__lora_adapter_path=str(adapter), model__quantization="nf4")
    torch.testing.assert_close(logits(again), logits(module), rtol=0, atol=1e-6)
    folder = {"trainer__export_hf": "last", "trainer__total_training_steps": 3}
    _, longer = watched(sft, tiny_model, tmp_path, **KEYS, **folder)  # resumes
    whole = plain(run.path / "checkpoints" / "global_step_3" / "huggingface")
    torch.testing.assert_close(logits(whole), logits(longer), rtol=0, atol=1e-5)


def test_a_reward_model_keeps_its_head_whole_beside_4_bits(tiny_model, tmp_path):
    run, module = watched(reward_model, tiny_model, tmp_path, **KEYS)
    assert sum(map(is_quantized, module.parameters())) == 14
    head = module.get_base_model().score
    assert type(head) is torch.nn.Linear and float(head.weight.detach().abs().max()) > 0
    merged = export_checkpoint(run.path / "checkpoints" / "global_step_2", tmp_path / "merged")
    theirs = AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32)
    torch.testing.assert_close(scores(theirs), scores(module), rtol=0, atol=1e-5)
