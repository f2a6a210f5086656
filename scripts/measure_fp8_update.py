#!/usr/bin/env python3
"""Where the time of an update with LoRA goes on a CUDA device, with the frozen base in bfloat16 and in fp8.

    python scripts/measure_fp8_update.py                       # products of a layer of 7B at 16,384 tokens
    python scripts/measure_fp8_update.py --update --prompts 4  # kernels of whole updates, by their time

Weights are random and drawn on the device. The first form times each product of a layer forward and back, and the
rounding before it; the second runs an update over groups of 8 responses that share a prompt, under torch's profiler.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from decode_speed import draw_model
from transformers import Qwen2Config

from posttrain.bench.workload import PRESETS
from posttrain.config.model import ModelConfig
from posttrain.config.root import ActorConfig, OptimConfig, RolloutCorrectionConfig
from posttrain.engine.base import EngineSettings
from posttrain.engine.torch_engine import TorchEngine
from posttrain.kernels.fp8 import FrozenFp8Weight, product, quantize_rows
from posttrain.models.loading import fuse_and_prove
from posttrain.models.lora import with_adapters
from posttrain.rollout.base import Output
from posttrain.rollout.generate import to_batch
from posttrain.workers.actor.dp_actor import ActorObjective

REPEAT = 10


def milliseconds(call: Callable[[], Any]) -> float:
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPEAT):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / REPEAT


def measure_products(shape: Any, tokens: int) -> None:
    size = shape.hidden_size // shape.num_attention_heads
    columns = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * size
    sizes = {
        "qkv": (columns, shape.hidden_size),
        "out": (shape.hidden_size, shape.hidden_size),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
    }
    totals = np.zeros(6)
    print(f"ms at {tokens} tokens  bf16: forward, back   fp8: rounding, forward, rounding, back")
    for name, (rows, width) in sizes.items():
        weight, x, grad = (
            torch.randn(*both, device="cuda", dtype=torch.bfloat16)
            for both in ((rows, width), (tokens, width), (tokens, rows))
        )
        frozen = FrozenFp8Weight(weight)
        assert frozen.backward is not None
        given, back = quantize_rows(x), quantize_rows(grad)
        both: Any = (frozen.forward.rounded, frozen.backward)
        calls = [
            lambda x=x, w=weight: x @ w.T,
            lambda grad=grad, w=weight: grad @ w,
            lambda x=x: quantize_rows(x),
            lambda given=given, w=both[0]: product(given, w, None, torch.bfloat16),
            lambda grad=grad: quantize_rows(grad),
            lambda back=back, w=both[1]: product(back, w, None, torch.bfloat16),
        ]
        times = np.array([milliseconds(call) for call in calls])
        totals += times
        speeds = [2e-9 * tokens * rows * width / times[place] for place in (0, 1, 3, 5)]
        rates = " ".join(f"{speed:,.0f}" for speed in speeds)
        print(f"{name:8s} " + "  ".join(f"{time:6.3f}" for time in times) + f"   TFLOP/s {rates}", flush=True)
    print("layer    " + "  ".join(f"{time:6.3f}" for time in totals))


def measure_update(shape: Any, options: argparse.Namespace) -> None:
    sizes = {key: value for key, value in asdict(shape).items() if key != "dtype"}
    config = Qwen2Config(**sizes, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, shape.vocab_size, options.prompt).tolist() for _ in range(options.prompts)]
    rows = [prompt for prompt in prompts for _ in range(8)]
    outputs = [
        Output(row, rng.integers(0, shape.vocab_size, options.tokens).tolist(), [-1.0] * options.tokens, "length")
        for row in range(len(rows))
    ]
    for fp8 in (False, True):
        batch = to_batch(rows, outputs, pad_token_id=0)
        batch.non_tensor_batch["uid"] = np.array([str(row // 8) for row in range(len(rows))], dtype=object)
        batch.batch["advantages"] = torch.randn(len(rows), 1) * batch.batch["response_mask"]
        model = fuse_and_prove(draw_model(config), f"--model {options.model}")
        module = with_adapters(model, ModelConfig(lora_rank=options.lora_rank))
        settings = EngineSettings(device=torch.device("cuda"), optim=OptimConfig(lr=1e-5), fp8=fp8)
        engine = TorchEngine(module, settings)
        objective = ActorObjective(ActorConfig(), RolloutCorrectionConfig(), float(options.tokens))

        def update(engine: TorchEngine = engine, batch: Any = batch, objective: Any = objective) -> None:
            engine.update(objective.prepare(batch.select()), objective)

        update()
        seconds = milliseconds(update) / 1e3 if options.time else 0.0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            update()
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"\n== {'fp8' if fp8 else 'bf16'}: {seconds:.3f} s an update, peak {peak:.1f} GiB")
        print(found.key_averages().table(sort_by="device_time_total", row_limit=30, max_name_column_width=90))
        del engine, module, model, update
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7b", choices=sorted(PRESETS))
    parser.add_argument("--pass-tokens", type=int, default=16384)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--time", action="store_true", help="time the update without the profiler, too")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--lora-rank", type=int, default=32)
    options = parser.parse_args()
    if options.update:
        measure_update(PRESETS[options.model], options)
    else:
        measure_products(PRESETS[options.model], options.pass_tokens)


if __name__ == "__main__":
    main()
