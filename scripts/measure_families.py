#!/usr/bin/env python3
"""Speed of the native rollout engine on a CUDA device with models that its general decoder decodes.

    python scripts/measure_families.py                                   # all shapes of family_shapes.py
    python scripts/measure_families.py deepseek-v2-lite --rows 512 --profile
    python scripts/measure_families.py gpt-oss-20b --sweep               # also the best tiles of its experts' products

Weights are random and drawn on the device. Responses are sampled in groups that share a prompt and never end early.
`measure_mixture_vllm.py --model NAME` does the same work with vLLM.
"""

from __future__ import annotations

import argparse
import gc
import time
from functools import partial
from typing import Any

import torch
from decode_speed import DEVICE, DTYPE, draw_model, grouped_prompts, measure_speed
from family_shapes import SHAPES, configuration
from measure_mixture import timed

from posttrain.config.rollout import RolloutConfig
from posttrain.kernels.cuda.clamped_experts import multiply
from posttrain.kernels.cuda.experts import Tile, sort_pairs
from posttrain.models.loading import fuse_and_prove
from posttrain.rollout.base import Sampling
from posttrain.rollout.engines import why_wrong
from posttrain.rollout.generate import generate
from posttrain.rollout.native.build import build_native

KERNELS = 25  # lines of a profile
CLAMPED = [(16, 128, 64, 4, 4), (32, 128, 64, 4, 4), (64, 128, 64, 4, 4), (64, 128, 64, 8, 4), (64, 64, 64, 4, 5),
           (64, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4),
           (128, 256, 64, 8, 3)]  # fmt: skip


def measure(name: str, options: argparse.Namespace) -> None:
    started = time.perf_counter()
    config = configuration(name, options.layers)
    model = draw_model(config)
    size = sum(weight.nbytes for weight in model.parameters())
    print(f"\n== {name}: {config.num_hidden_layers} layers, {size / 1e9:.1f} GB", flush=True)
    fuse_and_prove(model, name)
    settings = RolloutConfig(max_num_seqs=max(options.rows), kv_cache_gb=options.cache_gb)
    engine, title = build_native(model, settings, decode=None, captures=not options.eager)
    print(f"engine: {title}")
    wrong = why_wrong(engine, model) or "equal up to rounding"
    print(f"log-probs against transformers': {wrong} ({time.perf_counter() - started:.1f} s)", flush=True)
    for rows in options.rows:
        speed = measure_speed(engine, rows, config.vocab_size, options)
        each = ", ".join(f"{rate:,.0f}" for rate in speed.rates)
        print(
            f"rows {rows}, {options.prompt} + {options.tokens} tokens: {max(speed.rates):,.0f} tokens/s, best of "
            f"{each}; {speed.step_ms:.2f} ms a step, prompts {speed.prompt_s * 1e3:.0f} ms "
            f"(first run {speed.first_s:.1f} s)",
            flush=True,
        )
        if options.profile:
            profile(engine, rows, config.vocab_size, options)
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def sweep(name: str, options: argparse.Namespace) -> None:
    """Print the times of both products of gpt-oss' experts, by tile and number of rows. The weights of one layer do not
    fit into the device's cache, so they come from memory."""
    config = configuration(name)
    experts, top_k, width = config.num_local_experts, config.num_experts_per_tok, config.hidden_size
    size = config.intermediate_size
    draw = partial(torch.randn, device=DEVICE, dtype=DTYPE)
    weights = (
        (draw(experts, width, 2 * size), draw(experts, 2 * size)),
        (draw(experts, size, width), draw(experts, width)),
    )
    for rows in options.rows:
        chosen = torch.rand(rows, experts, device=DEVICE).topk(top_k).indices.int()
        pairs, x = sort_pairs(chosen, experts), draw(rows, width)
        gated = draw(rows * top_k, size)
        for numbers in CLAMPED:
            tile = Tile(*numbers, described=True)
            given = {"order_P": pairs[0], "ends_X": pairs[1], "top_k": top_k, "tile": tile}
            works = (
                partial(multiply, x, *weights[0], **given, gate=(1.702, 7.0)),
                partial(multiply, gated, *weights[1], **given),
            )
            try:
                found = [timed(work) for work in works]
            except Exception as error:  # a tile may need more shared memory than there is
                print(f"  rows {rows}, {tile}: {type(error).__name__}")
                continue
            print(
                f"  rows {rows}, {tile}: gate and up {found[0] * 1e3:.0f} us, down {found[1] * 1e3:.0f} us", flush=True
            )


def profile(engine: Any, rows: int, vocabulary: int, options: argparse.Namespace) -> None:
    """Print the kernels that take most of the device's time in a generation, per decode step."""
    prompts = grouped_prompts(rows, vocabulary, options)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        generate(engine, prompts, [Sampling(max_tokens=options.tokens)] * rows, range(rows))
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:KERNELS]:
        ms = event.self_device_time_total / 1e3 / options.tokens
        print(f"  {ms:8.3f} ms a step, {event.count / options.tokens:7.1f} calls  {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*SHAPES, []], default=list(SHAPES), help="shapes")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--rows", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--group", type=int, default=8, help="responses of a prompt")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cache-gb", type=float, default=32)
    parser.add_argument("--sweep", action="store_true", help="try tiles of gpt-oss' experts")
    parser.add_argument("--eager", action="store_true", help="no captured steps")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a generation")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for name in options.names:
        if options.sweep and name == "gpt-oss-20b":
            sweep(name, options)
        measure(name, options)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
