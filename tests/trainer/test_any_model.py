"""Models of kinds that no file of ours names train from their folder alone, each by the way that the docs give it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import metrics_of, run

from posttrain.models.embedded import byte_tokenizer

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
LATENT = {"head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MODELS = {
    "llama": ({}, "native (fused decoder"),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64}, "native (general decoder"),
    "gemma3_text": ({"sliding_window": 6, "query_pre_attn_scalar": 8}, "native (general decoder"),
    "olmo2": ({}, "native (general decoder"),
    "gemma2": ({"sliding_window": 6, "query_pre_attn_scalar": 8}, "native (general decoder"),  # its scores are capped
    "deepseek_v3": (LATENT, "native (general decoder"),
    "qwen3_next": (LINEAR | MIXED, "native (general decoder"),
    "qwen3_5_text": (LINEAR, "native (general decoder"),
    "mamba2": ({"num_heads": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8}, "native (general decoder"),
    "falcon": ({"head_dim": None}, "hf"),  # it chooses its attention when it is made
    "bloom": ({"n_layer": 2, "n_head": 4}, "hf"),  # it writes its attention out
}


def write(kind: str, folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    shape = {name: value for name, value in {**SHAPE, **MODELS[kind][0]}.items() if value is not None}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **ends, **shape)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", MODELS)
def test_a_decoder_only_folder_trains_without_code(kind, sums, tmp_path, capsys):
    result = run(write(kind, tmp_path / "model"), sums, tmp_path, trainer__total_training_steps=1)
    (line,) = metrics_of(result.path)
    assert line["actor/optimizer_steps"] == 1 and line["actor/grad_norm"] > 0 and line["mismatch/logp_max"] < 1e-4
    lines = capsys.readouterr().out.splitlines()
    said = next(text for text in lines if text.startswith("Rollout engine: "))
    assert said.removeprefix("Rollout engine: ").startswith(MODELS[kind][1])
    fallen_back = [text for text in lines if f"{kind}: packed rows do not give what transformers" in text]
    assert bool(fallen_back) == (MODELS[kind][1] == "hf")


def test_the_experts_and_the_router_of_a_mixture_learn(sums, tmp_path):
    """DeepSeek-V3's kind: after a step every part of the mixture has moved."""
    from safetensors.torch import load_file

    folder = write("deepseek_v3", tmp_path / "model")
    more = {
        "trainer__total_training_steps": 1,
        "trainer__export_hf": "last",
        "actor_rollout_ref__actor__optim__lr": 1e-2,
    }
    result = run(folder, sums, tmp_path, **more)
    before = load_file(folder / "model.safetensors")
    [after] = [load_file(path) for path in result.path.rglob("huggingface/model.safetensors")]
    moved = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    mixture = {name for name in before if ".mlp.experts." in name or ".mlp.gate.weight" in name}
    assert len(mixture) > 4 and mixture - moved == set()
