"""Shared by the scripts that measure decoding on a CUDA device: models with random weights, and an engine's speed.

Responses are sampled in groups that share a prompt and never end early.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from posttrain.rollout.base import Sampling
from posttrain.rollout.generate import generate

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16


def draw_model(config: Any) -> Any:
    """A frozen model of this configuration, its weights drawn on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)  # drawing in float32 first would need twice the memory
    try:
        with DEVICE:
            torch.manual_seed(0)
            model: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def grouped_prompts(rows: int, vocabulary: int, options: argparse.Namespace) -> list[list[int]]:
    """`rows` random prompts of `options.prompt` tokens, equal within groups of `options.group`."""
    generator = torch.Generator().manual_seed(rows)
    count = -(-rows // options.group)
    unique = torch.randint(0, vocabulary, (count, options.prompt), generator=generator).tolist()
    return [unique[row // options.group] for row in range(rows)]


@dataclass(frozen=True)
class Speed:
    """Seconds of the first run, which compiles and captures, and of the prompts alone; tokens a second of each run."""

    first_s: float
    prompt_s: float
    rates: list[float]
    step_ms: float


def measure_speed(engine: Any, rows: int, vocabulary: int, options: argparse.Namespace) -> Speed:
    """The speed of `rows` responses of `options.tokens` tokens, prompts included, over `options.repeat` runs."""
    prompts = grouped_prompts(rows, vocabulary, options)

    def seconds(tokens: int, seed: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        outputs = generate(engine, prompts, [Sampling(max_tokens=tokens)] * rows, range(seed, seed + rows))
        taken = time.perf_counter() - started
        assert all(len(output.token_ids) == tokens for output in outputs)
        return taken

    first = seconds(options.tokens, 0)
    prompt = min(seconds(1, seed) for seed in range(2))
    found = [seconds(options.tokens, 1000 * seed) for seed in range(1, options.repeat + 1)]
    step = (min(found) - prompt) / (options.tokens - 1) * 1e3
    return Speed(first, prompt, [rows * options.tokens / taken for taken in found], step)
