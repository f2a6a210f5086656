"""A folder whose weights are not those of its config.json is refused unless a setting allows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.config.model import ModelConfig
from posttrain.models.loading import WeightsError, load_causal_lm
from posttrain.models.scorer_loading import load_scorer

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_model, tmp_path):
    """Makes a folder of the tiny model with changed settings, without some weights, or with others."""

    def make(*, config=None, without: str | None = None, more=None) -> Path:
        settings = json.loads((tiny_model / "config.json").read_text())
        weights = load_file(tiny_model / "model.safetensors")
        kept = {name: weight for name, weight in weights.items() if without is None or without not in name}
        (tmp_path / "config.json").write_text(json.dumps({**settings, **(config or {})}))
        save_file({**kept, **(more or {})}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return make


def load(path: Path, **more):
    headless = more.pop("headless", False)
    config = ModelConfig(path=str(path), **more)
    return load_causal_lm(config, dtype=torch.float32, device=CPU, headless=headless, role="actor_rollout_ref.")


def test_a_config_with_three_layers_over_two_is_refused(folder):
    three = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    with pytest.raises(WeightsError) as caught:
        load(folder(config=three))
    said = str(caught.value)
    assert "it lacks weights, which would begin random (model.layers.2.input_layernorm.weight" in said
    assert "actor_rollout_ref.model.allow_other_weights=True trains nevertheless" in said and "no place" not in said


def test_a_config_of_another_kind_is_refused(folder):
    with pytest.raises(
        WeightsError, match=r"it lacks weights.*\(bert\..*; it holds weights that the model has no place"
    ):
        load(folder(config={"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True}))


def test_a_config_with_one_layer_over_two_is_refused_also_when_it_is_laid_over(folder):
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    with pytest.raises(WeightsError, match=r"no place for \(model\.layers\.1\.input_layernorm\.weight"):
        load(folder(), override_config=one)
    assert load(folder(), override_config=one, allow_other_weights=True).config.num_hidden_layers == 1


def test_weights_of_another_shape_are_refused_with_both_shapes(folder):
    wide = {"intermediate_size": 48}
    with pytest.raises(
        WeightsError, match=r"another shape \(.*down_proj\.weight is \(32, 64\) there and \(32, 48\) by"
    ):
        load(folder(config=wide))
    assert load(folder(config=wide), allow_other_weights=True).config.intermediate_size == 48


def test_whole_folders_old_tables_and_value_heads_are_no_reason(folder):
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "v_head.summary.weight": torch.ones(1, 32)}
    assert load(folder(more=tables)).forward_mode.packed


def test_a_critic_may_come_from_a_reward_model_whose_folder_has_no_language_head(folder):
    untied = {"tie_word_embeddings": False}
    path = folder(config=untied, more={"score.weight": torch.ones(1, 32)})
    with pytest.raises(WeightsError, match=r"lacks weights.*\(lm_head\.weight\).*no place for \(score\.weight\)"):
        load(path)
    load(path, headless=True)
    with pytest.raises(WeightsError, match=r"model\.layers\.0\.mlp"):
        load(folder(config=untied, without="layers.0.mlp"), headless=True)


def test_a_reward_model_is_refused_alike(folder):
    labels = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "a"}, "label2id": {"a": 0}}
    head, extra = {"score.weight": torch.ones(1, 32)}, {"model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)}
    load_scorer(str(folder(config=labels, more=head)), CPU, torch.float32)
    with pytest.raises(WeightsError, match=r"reward_model\.model\.path=.*no place for \(model\.layers\.7") as caught:
        load_scorer(
            str(folder(config=labels, more={**head, **extra})), CPU, torch.float32, setting="reward_model.model.path"
        )
    assert "allow_other_weights" not in str(caught.value)  # a frozen scorer has no such setting
    with pytest.raises(WeightsError, match="lacks weights"):
        load_scorer(str(folder(without="layers.1.mlp")), CPU, torch.float32, new_head=True)
    load_scorer(str(folder(without="layers.1.mlp")), CPU, torch.float32, new_head=True, allow_other_weights=True)
