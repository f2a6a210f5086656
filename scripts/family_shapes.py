"""Shapes of models that the general decoder decodes, for the scripts that measure it: transformers' configurations,
whose weights are drawn at random."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

_NO_TOKENS: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "topk_method": "greedy",
        "scoring_func": "softmax", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "moe_layer_freq": 1, "max_position_embeddings": 4096,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "max_position_embeddings": 131072,
    },
    "gemma-2-2b": {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "vocab_size": 256000, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
    },
}  # fmt: skip


def configuration(name: str, layers: int | None = None) -> Any:
    """The configuration called `name`, with its own number of layers if none is given."""
    given = {**SHAPES[name], **_NO_TOKENS, "dtype": "bfloat16"}
    if layers:
        given["num_hidden_layers"] = layers
    return AutoConfig.for_model(**given)
