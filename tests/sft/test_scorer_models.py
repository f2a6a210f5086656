"""Reward models as folders: one score per row, equal to transformers' own forward pass, packed or padded."""

from __future__ import annotations

import json

import pytest
import torch

from posttrain.models.loading import ModelError
from posttrain.models.scorer import packs_rows, score_rows
from posttrain.models.scorer_loading import load_scorer

CPU = torch.device("cpu")
ROWS = [[5, 6, 7], [9], list(range(20, 60)), [7, 7, 256], [256, 3]]  # 256 is the byte tokenizer's padding


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One-label classifiers, untrained: packed, plain attention, attention of its own, encoder."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BloomConfig,
        BloomForSequenceClassification,
        Gemma2Config,
        Gemma2ForSequenceClassification,
        LlamaConfig,
        LlamaForSequenceClassification,
    )

    shape = {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_labels": 1,
        "pad_token_id": 256,
    }
    torch.manual_seed(0)
    models = {
        "llama": LlamaForSequenceClassification(LlamaConfig(**shape, num_key_value_heads=1, initializer_range=0.3)),
        "gemma2": Gemma2ForSequenceClassification(
            Gemma2Config(**shape, num_key_value_heads=1, head_dim=8, initializer_range=0.3)
        ),
        "bloom": BloomForSequenceClassification(BloomConfig(**shape, n_layer=2, n_head=2, initializer_range=0.3)),
        "bert": BertForSequenceClassification(BertConfig(**shape, initializer_range=0.3)),
    }
    root = tmp_path_factory.mktemp("scorers")
    for name, model in models.items():
        model.save_pretrained(root / name)
    return root


@pytest.mark.parametrize(("kind", "packed"), [("llama", True), ("gemma2", True), ("bloom", False), ("bert", False)])
def test_scores_equal_a_plain_forward_pass_in_any_passes(folders, kind, packed):
    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(folders / kind, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = torch.stack([plain(torch.tensor([row])).logits[0, 0] for row in ROWS])
    assert expected.std() > 0.01
    model = load_scorer(str(folders / kind), CPU, torch.float32)
    assert packs_rows(model) is packed
    for limits in ({}, {"max_rows": 1}, {"max_rows": 2}, {"token_budget": 45}):
        torch.testing.assert_close(score_rows(model, ROWS, **limits), expected, atol=2e-5, rtol=1e-5)


def test_a_causal_model_gets_a_head_of_zeros_only_where_it_is_to_be_trained(tiny_model):
    with pytest.raises(ModelError, match=r"reward_model\.model\.path=.*Qwen2ForCausalLM, not a reward model"):
        load_scorer(str(tiny_model), CPU, torch.float32, setting="reward_model.model.path")
    model = load_scorer(str(tiny_model), CPU, torch.float32, new_head=True)
    assert model.score.weight.shape == (1, 32)
    assert score_rows(model, ROWS).tolist() == [0.0] * len(ROWS)


def test_folders_that_cannot_give_one_score_are_refused(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    settings = json.loads((folders / "llama" / "config.json").read_text())
    state = load_file(folders / "llama" / "model.safetensors")

    def folder(name, config, weights):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        save_file(weights, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        return str(tmp_path / name)

    labels = {"id2label": {str(i): str(i) for i in range(3)}, "label2id": {str(i): i for i in range(3)}}
    with pytest.raises(ModelError, match="has 3 labels"):
        load_scorer(folder("three", {**settings, **labels}, state), CPU, torch.float32)
    headless = {name: weight for name, weight in state.items() if name != "score.weight"}
    with pytest.raises(ModelError, match=r"no trained score head \(score.weight missing\)"):
        load_scorer(folder("headless", settings, headless), CPU, torch.float32)
    broken = {name: weight for name, weight in state.items() if "layers.1.mlp" not in name}
    with pytest.raises(ModelError, match="lacks weights"):
        load_scorer(folder("broken", settings, broken), CPU, torch.float32, new_head=True)
    with pytest.raises(ModelError, match="knows no such key"):
        load_scorer(str(folders / "llama"), CPU, torch.float32, override_config={"no_such": 1})
    with pytest.raises(ModelError, match="no such folder"):
        load_scorer(str(tmp_path / "nothing"), CPU, torch.float32)
