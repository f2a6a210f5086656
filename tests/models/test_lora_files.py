"""Adapters to and from peft's files, the merged model, and the fingerprint of a base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from posttrain.config.model import ModelConfig
from posttrain.models.adapter_files import adapter_parameters, adapter_settings, fingerprint, write_adapter
from posttrain.models.adapter_targets import AdapterError
from posttrain.models.lora import add_adapters, save_merged, with_adapters
from tests.rollout.tiny import tiny

IDS = torch.tensor([[5, 9, 3, 77, 12]])


def changed(model, **settings):
    """The model with adapters that are not zero."""
    adapted = add_adapters(model, ModelConfig(lora_rank=3, lora_alpha=5, **settings))
    torch.manual_seed(0)
    for weight in adapter_parameters(adapted).values():
        weight.data.normal_(0, 0.2)
    return adapted


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny("qwen2-tied").save_pretrained(folder)
    return folder


def plain(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"], r".*layers\.1\..*q_proj"])
def test_the_adapter_folder_loads_in_peft_and_here_and_the_merged_one_in_transformers(base, tmp_path, targets):
    ours = changed(plain(base), target_modules=targets)
    expected = logits(ours)
    assert not torch.allclose(expected, logits(plain(base)), atol=1e-2)
    write_adapter(tmp_path / "adapter", adapter_parameters(ours), adapter_settings(ours, str(base)))
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    theirs = PeftModel.from_pretrained(plain(base), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=1e-5)
    stored = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    shape = {"lora_rank": stored["r"], "lora_alpha": stored["lora_alpha"], "target_modules": stored["target_modules"]}
    again = with_adapters(plain(base), ModelConfig(**shape, lora_adapter_path=str(tmp_path / "adapter")))
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=0)

    save_merged(ours, tmp_path / "merged")
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=0)
    assert ours.config.tie_word_embeddings  # the live model is what it was
    tied = "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    assert tied is (targets != ["q_proj", "lm_head"])


def test_an_adapter_that_peft_wrote_is_taken_with_its_scale_and_patterns(base, tmp_path):
    from peft import LoraConfig, get_peft_model

    settings = {"use_rslora": True, "rank_pattern": {"v_proj": 5}, "alpha_pattern": {"q_proj": 40}, "lora_dropout": 0.1}
    theirs = get_peft_model(plain(base), LoraConfig(r=3, target_modules=["q_proj", "v_proj"], **settings))
    for weight in adapter_parameters(theirs).values():
        weight.data.normal_(0, 0.2)
    theirs.save_pretrained(str(tmp_path))
    shape = ModelConfig(lora_rank=3, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_adapter_path=str(tmp_path))
    torch.testing.assert_close(logits(with_adapters(plain(base), shape)), logits(theirs.eval()), rtol=0, atol=1e-6)


def test_an_adapter_of_another_model_is_refused_with_the_first_tensors_that_differ(base, tmp_path):
    ours = changed(plain(base), target_modules=["q_proj"])
    weights = {name: weight.detach() for name, weight in adapter_parameters(ours).items()}
    first = next(iter(weights))
    wrong = {**weights, first: torch.zeros(3, 64), "stranger.lora_A.weight": torch.zeros(1)}
    write_adapter(tmp_path, wrong, adapter_settings(ours, str(base)))
    shape = ModelConfig(lora_rank=3, target_modules=["q_proj"], lora_adapter_path=str(tmp_path))
    with pytest.raises(AdapterError, match=r"stranger.*belongs to no adapter.*\(3, 64\) there and \(3, 32\) here"):
        with_adapters(plain(base), shape)


def test_fingerprints_are_those_of_the_weights_wherever_they_lie_and_however_they_are_split(base, tmp_path):
    shutil.copytree(base, tmp_path / "moved")
    plain(base).save_pretrained(tmp_path / "split", max_shard_size="20KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 1
    own = fingerprint(str(base))
    assert fingerprint(str(tmp_path / "moved")) == own == fingerprint(str(tmp_path / "split"))
    weights = load_file(tmp_path / "moved" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.001
    save_file(weights, tmp_path / "moved" / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(str(tmp_path / "moved")) != own
