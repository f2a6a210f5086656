"""Tiny random models of the kinds that rollout engines must know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.models.attention import ATTENTION
from posttrain.models.embedded import byte_tokenizer
from posttrain.models.fused_layer import fuse_norms

VOCABULARY = 97
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_LINEAR = {
    "initializer_range": 0.1,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "llama": {"model_type": "llama"},
    "llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
    "qwen3-moe-mixed": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "intermediate_size": 24,
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "glm4-moe": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        **LATENT,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **LATENT,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        **_LINEAR,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3.5": {"model_type": "qwen3_5_text", **_LINEAR},
    "mamba2": {"model_type": "mamba2", "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8, "state_size": 8},
    "mamba": {"model_type": "mamba", "state_size": 8, "time_step_rank": 4},
    "falcon-h1": {
        "model_type": "falcon_h1",
        "head_dim": 8,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 64},
}
RECURRENT = ["qwen3-next", "qwen3.5", "mamba2", "mamba", "falcon-h1", "lfm2"]
MIXTURES = {"qwen3-moe", "qwen3-moe-mixed", "qwen2-moe", "mixtral", "olmoe"}
FAST = {"qwen2", "qwen2-window", "qwen2-tied", "qwen3", "llama", "llama3-rope", "mistral", *MIXTURES}


def write_tiny(kind: str, folder: Path, **changed: Any) -> Path:
    """A folder with such a model for the byte tokenizer, and the tokenizer."""
    tokenizer = byte_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny(kind, attention="eager", vocab_size=len(tokenizer), **special, **changed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny(
    kind: str, dtype: torch.dtype = torch.float32, attention: str = ATTENTION, seed: int = 0, **changed: Any
) -> Any:
    """A random model of that kind, the same for the same seed; `changed` are settings of its configuration."""
    settings = {**KINDS[kind], **changed}
    config = AutoConfig.for_model(settings.pop("model_type"), **{**_COMMON, **settings})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # with 0, experts would be chosen by their scores alone
                buffer.normal_(std=0.1)
    if attention == ATTENTION:
        fuse_norms(model)
    return model
