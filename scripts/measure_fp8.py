#!/usr/bin/env python3
"""Speed of the native rollout engine on a CUDA device in bfloat16 and in fp8, over the same weights.

    python scripts/measure_fp8.py                     # the shape of Qwen2.5-7B at 64, 512 and 1,024 sequences
    python scripts/measure_fp8.py --model 0.5b --rows 512

Weights are random and drawn on the device. Responses are sampled in groups that share a prompt and never end early.
Printed are tokens a second, the time of a decode step, of the prompts, and of making the fp8 copies anew after a weight
sync. How far fp8 is from bfloat16 depends on the weights, and random ones are no example: a run's step 0 prints it.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import asdict

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from posttrain.bench.presets import PRESETS
from posttrain.config.rollout import RolloutConfig
from posttrain.rollout.base import Sampling
from posttrain.rollout.generate import generate
from posttrain.rollout.native.build import build_native

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


def draw_model(name: str) -> Qwen2ForCausalLM:
    sizes = {key: value for key, value in asdict(PRESETS[name]).items() if key != "dtype"}
    config = Qwen2Config(**sizes, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with DEVICE:
            torch.manual_seed(0)
            model = Qwen2ForCausalLM._from_config(config, dtype=DTYPE)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def measure(model, fp8: bool, rows: int, options: argparse.Namespace) -> None:
    engine, _ = build_native(
        model, RolloutConfig(max_num_seqs=rows, kv_cache_gb=options.cache_gb), decode=None, fp8=fp8
    )
    generator = torch.Generator().manual_seed(rows)
    count = -(-rows // options.group)
    unique = torch.randint(0, model.config.vocab_size, (count, options.prompt), generator=generator).tolist()
    prompts = [unique[row // options.group] for row in range(rows)]

    def seconds(tokens: int, seed: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        outputs = generate(engine, prompts, [Sampling(max_tokens=tokens)] * rows, range(seed, seed + rows))
        assert all(len(output.token_ids) == tokens for output in outputs)
        return time.perf_counter() - started

    first = seconds(options.tokens, 0)
    prompt_s = min(seconds(1, seed) for seed in range(2))
    found = [seconds(options.tokens, 1000 * seed) for seed in range(1, options.repeat + 1)]
    best = min(found)
    step = (best - prompt_s) / (options.tokens - 1) * 1e3
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.load_weights((), version=1)
    engine.decoder._look_at_weights()  # pyright: ignore
    torch.cuda.synchronize()
    anew = time.perf_counter() - started
    each = ", ".join(f"{rows * options.tokens / taken:,.0f}" for taken in found)
    print(
        f"{'fp8 ' if fp8 else 'bf16'} {rows:5d} sequences: {rows * options.tokens / best:9,.0f} tokens/s (of {each}), "
        f"{step:.2f} ms a step, prompts {prompt_s * 1e3:.0f} ms, copies after a sync {anew * 1e3:.1f} ms, "
        f"first run {first:.1f} s, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
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
    model = draw_model(options.model)
    for rows in options.rows:
        for fp8 in (False, True):
            measure(model, fp8, rows, options)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
