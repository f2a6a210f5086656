#!/usr/bin/env python3
"""Tokens per second of the native engine on a CPU, without and with LoRA adapters (all linear layers).

    python scripts/measure_lora_rollout.py

A random Qwen2 of 44 million parameters in float32, 32 responses of 32 tokens. `beside` multiplies base and adapters
apart; `folded` is what a run does for responses of 16 tokens and more: packed copies that hold both, made once per
weight sync, and counted here. Seconds are the process's own, so that a busy machine changes little.
"""

from __future__ import annotations

import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.models.attention import ATTENTION
from posttrain.models.decoder import FastDecoder
from posttrain.models.fused_layer import fuse_norms
from posttrain.models.lora import add_adapters
from posttrain.rollout.base import Sampling
from posttrain.rollout.generate import generate
from posttrain.rollout.native.build import build_native

SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
ROWS, TOKENS = 32, 32


def model():
    torch.manual_seed(0)
    settings = Qwen2Config(vocab_size=1024, num_key_value_heads=12, eos_token_id=None, **SHAPE)
    made = Qwen2ForCausalLM(settings).eval()
    made.set_attn_implementation(ATTENTION)
    fuse_norms(made)
    return made


def speed(module) -> float:
    """Tokens per processor second of a rollout after a weight sync; the second of two."""
    engine = build_native(module, RolloutConfig(kv_cache_gb=1), decode=None)[0]
    prompts = [[row + 1, 2, 3, 4] for row in range(ROWS)]
    for version in range(2):
        engine.load_weights((), version)
        started = time.process_time()
        generate(engine, prompts, [Sampling(max_tokens=TOKENS)] * ROWS, range(ROWS))
        seconds = time.process_time() - started
    return ROWS * TOKENS / seconds


def main() -> None:
    print(f"{torch.get_num_threads()} threads; no adapters: {speed(model()):.0f} tokens per processor second")
    for rank in (16,):
        adapted = add_adapters(model(), ModelConfig(lora_rank=rank))
        folded = speed(adapted)
        may_merge, FastDecoder._may_merge = FastDecoder._may_merge, lambda self: False
        beside = speed(adapted)
        FastDecoder._may_merge = may_merge
        print(f"rank {rank}, tokens per processor second: beside {beside:.0f}, folded {folded:.0f}")


if __name__ == "__main__":
    main()
