#!/usr/bin/env python3
"""Speed of the native rollout engine on a CUDA device in bfloat16 and in fp8, over the same weights.

    python scripts/measure_fp8.py                     # the shape of Qwen2.5-7B at 64, 512 and 1,024 sequences
    python scripts/measure_fp8.py --model 0.5b --rows 512

Weights are random and drawn on the device. Responses are sampled in groups that share a prompt and never end early.
Printed are tokens a second, the time of a decode step, of the prompts, and of refilling the fp8 copies after a weight
sync. How far fp8 is from bfloat16 depends on the weights, and random ones are no example: a run's step 0 prints it.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import asdict
from typing import Any

import torch
from decode_speed import draw_model, measure_speed
from transformers import Qwen2Config

from posttrain.bench.workload import PRESETS
from posttrain.config.rollout import RolloutConfig
from posttrain.rollout.native.build import build_native


def measure(model: Any, fp8: bool, rows: int, options: argparse.Namespace) -> None:
    settings = RolloutConfig(max_num_seqs=rows, kv_cache_gb=options.cache_gb)
    engine, _ = build_native(model, settings, decode=None, fp8=fp8)
    speed = measure_speed(engine, rows, model.config.vocab_size, options)
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.load_weights((), version=1)
    engine.decoder._look_at_weights()  # pyright: ignore
    torch.cuda.synchronize()
    refill = time.perf_counter() - started
    each = ", ".join(f"{rate:,.0f}" for rate in speed.rates)
    print(
        f"{'fp8 ' if fp8 else 'bf16'} {rows:5d} sequences: {max(speed.rates):9,.0f} tokens/s (of {each}), "
        f"{speed.step_ms:.2f} ms a step, prompts {speed.prompt_s * 1e3:.0f} ms, copies after a sync {refill * 1e3:.1f} "
        f"ms, first run {speed.first_s:.1f} s, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7b", choices=sorted(PRESETS))
    parser.add_argument("--rows", type=lambda text: [int(one) for one in text.split(",")], default=[64, 512, 1024])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--cache-gb", type=float, default=48.0)
    options = parser.parse_args()
    sizes = {key: value for key, value in asdict(PRESETS[options.model]).items() if key != "dtype"}
    model = draw_model(Qwen2Config(**sizes, eos_token_id=None, bos_token_id=None, pad_token_id=None))
    for rows in options.rows:
        for fp8 in (False, True):
            measure(model, fp8, rows, options)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
