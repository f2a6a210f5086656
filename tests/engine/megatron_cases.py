"""The cases of `megatron_runs.py`: tiny models of each family, and how engines cut them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine_tools import VOCABULARY, ragged_batch

from posttrain.engine.base import EngineLayout

FSDP = "fsdp2"
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v2", "glm4_moe")
CASES: list[tuple[str, str, int]] = [
    *((model, FSDP, 1) for model in ("qwen2", "qwen3", "llama", *MIXTURES)),
    ("qwen2", "fsdp", 1),
    *((model, "megatron 1,1,1", 1) for model in ("qwen2", "qwen3", "llama", *MIXTURES)),
    *((model, "megatron 2,1,1", 2) for model in ("qwen2", "qwen3", "llama")),
    *((model, "megatron 1,2,1", 2) for model in ("qwen2", "llama")),
    ("qwen3", "megatron 1,1,1", 2),
    ("qwen3_moe", "megatron 1,1,2", 2),
    ("mixtral", "megatron 1,1,2", 2),
    *((model, cut, 2) for model in MIXTURES[2:] for cut in ("megatron 2,1,1", "megatron 1,2,1", "megatron 1,1,2")),
    ("deepseek_v3", "megatron 1,2,1 last=2", 2),
    *((model, "megatron 1,2,1 virtual=2", 2) for model in ("llama", "glm4_moe")),
    *((model, "megatron 2,1,1 sequence=0", 2) for model in ("qwen3", "deepseek_v3")),
    *((model, "megatron 1,1,1 context=2", 2) for model in ("qwen2", "qwen3_moe", "deepseek_v3")),
    *((model, "megatron 2,2,2", 4) for model in ("qwen3_moe", *MIXTURES[2:])),
    ("deepseek_v3", "megatron 2,1,2 context=2", 4),
    ("qwen3", "megatron 1,2,1 context=2", 4),
    ("glm4_moe", "megatron 2,2,1 virtual=2", 4),
]
"""Model, strategy (of Megatron with its sizes: tensor, pipeline, expert; and more of `MORE`), ranks."""
MORE = {
    "last": "num_layers_in_last_pipeline_stage",
    "context": "context_parallel_size",
    "sequence": "sequence_parallel",
    "virtual": "virtual_pipeline_parallel_size",
}
GRADIENTS = [("qwen3", FSDP, 1), ("qwen3", "megatron 1,1,1", 2), ("qwen2", FSDP, 1), ("qwen2", "megatron 1,2,1", 2)]
"""Two copies of a model beside one of torch's engine, and two stages of one with a tied embedding."""


def tiny_models() -> dict[str, Any]:
    """One model of every family, with weights large enough that every part of it matters."""
    import transformers as hf

    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    # A token of the rows: it learns nothing there.
    shape["pad_token_id"] = int(ragged_batch(12).batch["input_ids"][0, -1])
    own = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    # Group-limited top-k with several groups, a dense layer before the mixtures, shared experts.
    deep = shape | {
        "num_hidden_layers": 3,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
    }
    deep |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    deep |= {"routed_scaling_factor": 1.5, "tie_word_embeddings": False}
    latent = deep | {"num_key_value_heads": 4, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    latent |= {"v_head_dim": 12}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 0.7}
    four = {"num_hidden_layers": 4}  # two stages with two chunks each
    models = {
        "qwen2": hf.Qwen2ForCausalLM(hf.Qwen2Config(**shape, tie_word_embeddings=True)),
        "qwen3": hf.Qwen3ForCausalLM(hf.Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True)),
        "llama": hf.LlamaForCausalLM(hf.LlamaConfig(**shape | four, tie_word_embeddings=False)),
        "qwen3_moe": hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**shape, **own, norm_topk_prob=False)),
        "mixtral": hf.MixtralForCausalLM(hf.MixtralConfig(**shape, num_local_experts=4)),
        "deepseek_v3": hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**latent, q_lora_rank=20, rope_parameters=yarn)),
        "deepseek_v2": hf.DeepseekV2ForCausalLM(
            hf.DeepseekV2Config(**latent, q_lora_rank=None, topk_method="group_limited_greedy")
        ),
        "glm4_moe": hf.Glm4MoeForCausalLM(
            hf.Glm4MoeConfig(**deep | four, head_dim=16, use_qk_norm=True, attention_bias=True)
        ),
    }
    torch.manual_seed(0)
    for model in models.values():
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0.0 if weight.ndim > 1 else 1.0, 0.2)
        for place, buffer in model.named_buffers():
            if place.endswith("correction_bias"):
                torch.nn.init.normal_(buffer, 0.0, 0.2)
    return models


def write_models(folder: Path) -> None:
    for name, model in tiny_models().items():
        model.save_pretrained(folder / name)


def layout(cut: str) -> EngineLayout:
    strategy, sizes, *more = f"{cut} ".split(" ")
    names = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
    own: dict[str, Any] = dict(zip(names, map(int, sizes.split(",")), strict=True)) if sizes else {}
    for name, _, value in (word.partition("=") for word in more if word):
        own[MORE[name]] = bool(int(value)) if name == "sequence" else int(value)
    return EngineLayout(strategy, own=own)
