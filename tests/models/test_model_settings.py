"""Settings of a model folder: where weights and tokenizer come from, their type, what is laid over, which adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from posttrain.config.model import ModelConfig
from posttrain.models import loading
from posttrain.models.embedded import write_model
from posttrain.models.loading import ModelError, load_causal_lm, load_tokenizer, resolve_dtype
from posttrain.models.lora import with_adapters

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
OWN_CODE = """
from transformers import Qwen2Config
class MineConfig(Qwen2Config):
    model_type = "mine"
"""
OWN_MODEL = """
from transformers import Qwen2ForCausalLM
from .configuration_mine import MineConfig
class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig
"""


def load(config: ModelConfig, **named):
    return load_causal_lm(config, **{"dtype": torch.float32, "device": CPU, **named})


def folder_with_code(source: Path, target: Path) -> Path:
    """A copy of a model folder whose kind is known to the code inside it alone."""
    shutil.copytree(source, target)
    (target / "configuration_mine.py").write_text(OWN_CODE)
    (target / "modeling_mine.py").write_text(OWN_MODEL)
    path = target / "config.json"
    mine = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "mine", "auto_map": mine}))
    return target


def test_weights_come_from_the_path_and_the_tokenizer_from_its_own(tiny_model, tmp_path):
    other = write_model(tmp_path / "other", **SHAPE, seed=5)
    tokenizer = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": "other"}))
    (other / "chat_template.jinja").unlink(missing_ok=True)
    config = ModelConfig(path=str(tiny_model), tokenizer_path=str(other))
    name = "model.layers.0.mlp.up_proj.weight"
    ours, theirs = (load(ModelConfig(path=str(path))).state_dict()[name] for path in (tiny_model, other))
    assert torch.equal(load(config).state_dict()[name], ours) and not torch.equal(ours, theirs)
    assert load_tokenizer(config).chat_template == "other"
    assert load_tokenizer(ModelConfig(path=str(tiny_model))).chat_template != "other"


def test_values_laid_over_the_models_configuration_reach_the_model(tiny_model):
    model = load(ModelConfig(path=str(tiny_model), override_config={"rms_norm_eps": 0.5}))
    ids, plain = torch.tensor([[1, 2, 3]]), load(ModelConfig(path=str(tiny_model)))
    assert model.config.rms_norm_eps == 0.5
    assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-3)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_the_type_of_the_weights_is_the_one_that_is_set(name):
    assert resolve_dtype(name, CPU) == getattr(torch, name)
    assert resolve_dtype("auto", CPU) == torch.float32 and resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16


def test_code_of_a_model_folder_runs_only_if_it_is_trusted(tiny_model, tmp_path):
    folder = folder_with_code(tiny_model, tmp_path / "mine")
    with pytest.raises(ModelError, match="custom code"):
        load(ModelConfig(path=str(folder)))
    model = load(ModelConfig(path=str(folder), trust_remote_code=True))
    assert type(model).__name__ == "MineForCausalLM"


def test_4_bits_are_asked_for_where_they_are_set(tiny_model, monkeypatch):
    """Without the library that holds them: what the loading is told."""
    asked = []
    monkeypatch.setattr(loading, "loading_options", lambda *told: asked.append(told[0]) or {})
    load(ModelConfig(path=str(tiny_model)))
    load(ModelConfig(path=str(tiny_model)), quantization="nf4")
    assert asked == ["nf4"]


def test_adapters_have_rank_scale_and_place_that_are_set(tiny_model):
    shape = {
        "lora_rank": 3,
        "lora_alpha": 12,
        "target_modules": ["q_proj", "up_proj"],
        "exclude_modules": ".*layers.1.*",
    }
    config = ModelConfig(path=str(tiny_model), **shape)
    model = with_adapters(load(config), config)
    adapters = {name: weight for name, weight in model.named_parameters() if ".lora_A." in name}
    places = [name.split("layers.")[1].split(".lora_A")[0] for name in adapters]
    assert sorted(places) == ["0.mlp.up_proj", "0.self_attn.q_proj"]
    assert {weight.shape[0] for weight in adapters.values()} == {3}
    assert model.base_model.model.model.layers[0].mlp.up_proj.scaling["default"] == 4.0
