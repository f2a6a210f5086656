"""Tiny models with random weights of the families that `check_model_families.py` and the tests compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Every family takes from here what its configuration has a name for.
SHAPE: dict[str, Any] = {
    "vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "n_positions": 64, "n_ctx": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_inner": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "num_layers": 2, "num_heads": 4, "max_seq_len": 64,
    "ffn_dim": 64, "dff": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "attention_heads": 4, "word_embed_proj_dim": 32, "ffn_hidden_size": 64, "rotary_dim": 4,
    "sliding_window": 6, "attention_window_size": 6, "window_size": 6, "query_pre_attn_scalar": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1, "moe_topk": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_k": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "state_size": 8, "time_step_rank": 4, "lru_width": 32, "attention_hidden_size": 32, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "head_dim": None}

# What a family needs beside that; None takes a value away.
FAMILIES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in (
        "llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode",
        "gpt_neox", "gpt_neox_japanese", "gptj", "codegen", "bloom", "mpt", "opt", "xglm", "openai-gpt", "ctrl",
        "biogpt", "phi", "stablelm", "starcoder2", "olmo", "olmo2", "olmo3", "granite", "cohere", "cohere2", "glm",
        "glm4", "ernie4_5", "exaone4", "helium", "persimmon", "nemotron", "seed_oss", "arcee", "apertus", "diffllama",
        "doge", "bitnet", "hunyuan_v1_dense", "nanochat", "modernbert-decoder",
        "mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "olmoe", "granitemoe", "granitemoeshared", "glm4_moe", "dots1",
        "ernie4_5_moe", "gpt_oss", "llama4_text", "jetmoe",
        "rwkv", "mamba", "falcon_mamba",
    )},
    "falcon": {"head_dim": None},
    "phi3": {"original_max_position_embeddings": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "minicpm3": LATENT,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ("recurrent", "recurrent", "attention")},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4, "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": None, "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 16,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "bert": {},
    "roberta": {"pad_token_id": 0},
}  # fmt: skip


def tiny_config(kind: str) -> Any:
    """The family's configuration, of two or three small layers."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(kind)
    known = {name: value for name, value in SHAPE.items() if hasattr(usual, name) or name in usual.attribute_map}
    wanted = {**known, **FAMILIES[kind]}
    named = {usual.attribute_map.get(name, name): value for name, value in wanted.items() if value is not None}
    return type(usual)(**named)


def write_tiny(kind: str, folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder of the family, without a tokenizer. Its weights are large enough for every layer to count:
    in a model fresh from its initialisation attention hardly changes a log-prob."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind))
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding) or type(module).__name__ == "Conv1D":
                size = module.weight.shape[0 if type(module).__name__ == "Conv1D" else 1]
                module.weight.copy_(torch.randn(module.weight.shape) * 1.5 / size**0.5)
        model.save_pretrained(folder)
    return folder
