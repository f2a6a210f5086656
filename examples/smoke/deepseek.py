"""Writes a DeepSeek-V3 with random weights to the folder that is named, small in every size, and the embedded model's
tokenizer. For the smoke run by Megatron."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed serves too

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from posttrain.models.embedded import byte_tokenizer
from posttrain.models.loading import silence_progress_bars

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 512,
}

if __name__ == "__main__":
    silence_progress_bars()
    tokenizer = byte_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=len(tokenizer), **ends, **SHAPE)).save_pretrained(sys.argv[1])
    tokenizer.save_pretrained(sys.argv[1])
