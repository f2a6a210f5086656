"""What all systems are measured on: models, sizes by name (`--work`), prompts as token ids, and response lengths.

A model is a preset with random weights, or a folder that you name. From `0.1b` on presets have the shapes of real
models: SmolLM2-135M, and Qwen2.5 of 0.5B, 1.5B and 7B. `small` is the default work on a CPU, `group` on a CUDA device;
sizes that are given explicitly override those of the name. Everything is drawn from a seed before any system is
started, so that all get the same rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.bench.device import Device
from posttrain.errors import UserError


@dataclass(frozen=True)
class Preset:
    """A Qwen2 decoder, written in `dtype`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    dtype: str
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True

    @property
    def parameters(self) -> int:
        hidden, kv = self.hidden_size, self.hidden_size // self.num_attention_heads * self.num_key_value_heads
        attention = 2 * hidden * hidden + 2 * hidden * kv + hidden + 2 * kv
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        tables = 1 if self.tie_word_embeddings else 2
        return tables * self.vocab_size * hidden + self.num_hidden_layers * layer + hidden


LONG = 131072  # positions: rows of 32k and more are measured

PRESETS = {
    "1m": Preset(272, 128, 544, 4, 4, 2, "float32"),
    "27m": Preset(4096, 512, 1600, 8, 8, 2, "bfloat16"),
    "0.1b": Preset(49152, 576, 1536, 30, 9, 3, "bfloat16", LONG),
    "0.5b": Preset(151936, 896, 4864, 24, 14, 2, "bfloat16", LONG),
    "1.5b": Preset(151936, 1536, 8960, 28, 12, 2, "bfloat16", LONG),
    "7b": Preset(152064, 3584, 18944, 28, 28, 4, "bfloat16", LONG, tie_word_embeddings=False),
}


@dataclass(frozen=True)
class Model:
    """A folder in Hugging Face format, and facts from its config.json."""

    name: str
    folder: Path
    dtype: str
    vocab_size: int
    config: dict[str, Any]


def find_model(name: str, device: str = "cpu") -> Model:
    """The preset or folder called `name`; a preset is written to the cache the first time, its weights drawn on
    `device`."""
    if name in PRESETS:
        preset = PRESETS[name]
        return _describe(
            name, _ensure("models", name, preset, lambda folder, shape: _write(folder, shape, preset, device))
        )
    folder = Path(os.path.expanduser(name))
    if not (folder / "config.json").is_file():
        raise UserError(f"--model {name}: neither a preset ({', '.join(PRESETS)}) nor a folder with a config.json")
    return _describe(folder.name, folder.resolve())


def _describe(name: str, folder: Path) -> Model:
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return Model(name, folder, dtype, int(text["vocab_size"]), config)


def find_shape(name: str) -> Model:
    """As `find_model`, but a preset has no weights: `draw` makes them where they are used; no disk is waited for."""
    if name not in PRESETS:
        return find_model(name)
    preset = PRESETS[name]
    return _describe(name, _ensure("shapes", name, preset, lambda folder, shape: _write_shape(folder, shape, preset)))


def draw(folder: str | Path, dtype: Any, device: Any) -> Any:
    """The model of a folder without weights, with random ones drawn on `device`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # drawing 7B in float32 first would take twice the memory
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_default_dtype(before)


def _ensure(home: str, name: str, preset: Preset, write: Callable[[Path, dict[str, Any]], None]) -> Path:
    # Written beside its place and renamed, so that a bench that is killed leaves no half of a model.
    from posttrain.bench import bench_folder

    folder = bench_folder() / home / name
    shape = {key: value for key, value in asdict(preset).items() if key != "dtype"}
    if (folder / "config.json").is_file():
        found = json.loads((folder / "config.json").read_text())
        if all(found.get(key) == value for key, value in shape.items()):
            return folder
    partial = folder.with_name(f".{name}.{os.getpid()}")
    write(partial, shape)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _write_shape(folder: Path, shape: dict[str, Any], preset: Preset) -> None:
    from transformers import Qwen2Config

    from posttrain.models.embedded import byte_tokenizer

    tokenizer = byte_tokenizer(shape["vocab_size"])
    config = Qwen2Config(
        **shape,
        architectures=["Qwen2ForCausalLM"],
        dtype=preset.dtype,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,  # pyright: ignore
        pad_token_id=tokenizer.pad_token_id,  # pyright: ignore
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write(folder: Path, shape: dict[str, Any], preset: Preset, device: str) -> None:
    from posttrain.models.loading import DTYPES, silence_progress_bars

    silence_progress_bars()
    _write_shape(folder, shape, preset)
    draw(folder, DTYPES[preset.dtype], device).save_pretrained(folder)


_GROUP = {"n": 8, "prompt_tokens": 128, "tokens": 512}
_TAIL = {"lengths": "long-tail", "mean_tokens": 256, "slots": 1024}

# Job -> name -> sizes.
WORKS: dict[str, dict[str, dict[str, Any]]] = {
    "rollout": {
        "small": {"prompts": 64, "n": 1, "prompt_tokens": 32, "tokens": 128},
        "group": {"prompts": 128, **_GROUP},
        "tail": {"prompts": 512, **_GROUP, "tokens": 2048, **_TAIL},
    },
    "step": {
        "small": {"prompts": 4, "n": 8, "prompt_tokens": 32, "tokens": 16, "steps": 30},
        "group": {"prompts": 64, **_GROUP, "steps": 6},
        "32k": {"prompts": 8, "n": 8, "prompt_tokens": 128, "tokens": 32640, "steps": 2, "budget": 32768},
        "16k": {"prompts": 8, "n": 8, "prompt_tokens": 128, "tokens": 16256, "steps": 2, "budget": 16384},
    },
    "train": {
        "small": {"prompts": 4, "n": 8, "prompt_tokens": 32, "tokens": 16},
        "group": {"prompts": 64, **_GROUP},
        "16k": {"prompts": 4, "n": 4, "prompt_tokens": 128, "tokens": 16256, "budget": 16384},
    },
    "sync": {"small": {}, "group": {}},
}

OTHERWISE = {"lengths": "fixed", "mean_tokens": None, "slots": None, "budget": None}


def fill_in_sizes(options: argparse.Namespace, place: Device) -> None:
    """Write the sizes that were not given into `options`, from the named work or the device's default."""
    known = WORKS[options.job]
    name = options.work or ("small" if place.kind == "cpu" else "group")
    if name not in known:
        raise UserError(f"--work {name}: bench {options.job} knows {', '.join(known)}")
    for key, value in {**OTHERWISE, **known[name]}.items():
        if getattr(options, key, None) is None:
            setattr(options, key, value)
    options.work = name
    if options.mean_tokens is not None and options.lengths != "long-tail":
        raise UserError("--mean-tokens is the mean of drawn lengths: give --lengths long-tail with it")


def default_model(place: Device) -> str:
    return "1m" if place.kind == "cpu" else "0.5b"


LENGTHS = ("fixed", "long-tail")
SPREAD = 1.0  # sigma of the lognormal: after the cut the longest tenth of the rows holds 28% of the tokens


@dataclass(frozen=True)
class Workload:
    """`prompts x n` rows; row i continues `prompts[i]` by `lengths[i]` tokens."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def make_workload(
    *,
    prompts: int,
    n: int,
    prompt_tokens: int,
    tokens: int,
    kind: str,
    vocab_size: int,
    mean: float | None = None,
    seed: int = 0,
) -> Workload:
    """Random prompts (ids below 256 where the vocabulary has so many), each `n` times, with their response lengths."""
    draw = random.Random(seed)
    highest = min(256, vocab_size)
    distinct = [[draw.randrange(highest) for _ in range(prompt_tokens)] for _ in range(prompts)]
    rows = [prompt for prompt in distinct for _ in range(n)]
    return Workload(rows, response_lengths(len(rows), tokens, kind, seed, mean))


def workload_of(sizes: argparse.Namespace, vocab_size: int) -> Workload:
    return make_workload(
        prompts=sizes.prompts,
        n=sizes.n,
        prompt_tokens=sizes.prompt_tokens,
        tokens=sizes.tokens,
        kind=sizes.lengths,
        mean=sizes.mean_tokens,
        vocab_size=vocab_size,
    )


def response_lengths(rows: int, tokens: int, kind: str, seed: int = 0, mean: float | None = None) -> list[int]:
    """`fixed`: all `tokens`. `long-tail`: lognormal with a median of `tokens` / 4, or with this `mean`, cut at
    `tokens`."""
    if kind == "fixed":
        return [tokens] * rows
    draw = random.Random(seed + 1)
    centre = math.log(max(1.0, tokens / 4)) if mean is None else centre_for(mean, tokens)
    drawn = [round(draw.lognormvariate(centre, SPREAD)) for _ in range(rows)]
    return [min(tokens, max(1, length)) for length in drawn]


def centre_for(mean: float, most: int) -> float:
    """The logarithm of the lognormal's median with which lengths cut at `most` have this mean."""
    if not 1 <= mean < most:
        raise UserError(f"--mean-tokens {mean:g}: give at least 1 and less than --tokens, which is {most}")
    # The mean after the cut grows with the centre, so bisection finds it.
    low, high = math.log(mean) - SPREAD**2, math.log(most) + 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_after_cut(middle, most) < mean else (low, middle)
    return low


def _mean_after_cut(centre: float, most: int) -> float:
    # E[min(X, most)] of a lognormal X.
    def below(x: float) -> float:
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    edge = (math.log(most) - centre) / SPREAD
    return math.exp(centre + SPREAD**2 / 2) * below(edge - SPREAD) + most * (1 - below(edge))
