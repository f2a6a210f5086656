"""Models to measure with: presets with random weights, or a folder that you name.

From `0.1b` on they have the shapes of real models: SmolLM2-135M, and Qwen2.5 of 0.5B, 1.5B and 7B.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
