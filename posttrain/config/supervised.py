"""Sections that the supervised trainers share: rows, optimizer, engine, and the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.config.optim import OptimConfig
from posttrain.config.schema import Section
from posttrain.config.trainer import RunConfig
from posttrain.settings import (
    COUNT_OR_ALL,
    ONE_OR_MORE,
    POSITIVE,
    POSITIVE_OR_INFINITE,
    SCHEDULES,
    SEED,
    SHARE,
    setting,
)


@dataclass
class RowsConfig(Section):
    """Which rows are learnt from, and how many at a time."""

    train_files: Any = None
    """One path or a list of paths: parquet, json or jsonl; unset, the embedded sums serve."""
    val_files: Any = None
    """Held-out files, as above; null means no validation."""
    train_batch_size: int = setting(256, range=ONE_OR_MORE)
    """Rows per optimizer step, over all workers; the loss is a mean over all of them."""
    micro_batch_size_per_gpu: int | None = setting(None, range=ONE_OR_MORE)
    """Most rows in one forward pass of a worker; null fills `max_token_len_per_gpu`. Results do not depend on it."""
    max_token_len_per_gpu: int = setting(16384, range=ONE_OR_MORE)
    """Token budget of one packed forward pass of a worker; unset, a GPU on which it does not fit gets a lower one.
    Results do not depend on it."""
    max_length: int = setting(1024, range=ONE_OR_MORE)
    """Longest row in tokens."""
    truncation: str = setting("error", choices=("error", "drop", "left", "right"))
    """What happens to a row that is longer: `error`, `drop` it, or cut it on the `left` or on the `right`; the run says
    how many there were."""
    train_max_samples: int = setting(-1, range=COUNT_OR_ALL)
    """Use at most this many training rows; -1 takes all."""
    val_max_samples: int = setting(-1, range=COUNT_OR_ALL)
    """Use at most this many validation rows; -1 takes all."""
    shuffle: bool = True
    """Draw the rows of an epoch in random order."""
    seed: int | None = setting(None, range=SEED)
    """Seed of the order of rows; null takes `trainer.seed`."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, e.g. `{enable_thinking: false}`."""
    system_prompt: str | None = None
    """Put before prompts that are plain strings, as a system message."""


@dataclass
class SupervisedOptimConfig(OptimConfig):
    """AdamW and its schedule. Example: `optim.lr=2e-5`."""

    lr: float = setting(1e-5, range=POSITIVE)
    """Learning rate after warm-up."""
    lr_warmup_steps_ratio: float = setting(0.05, range=SHARE)
    """Share of all optimizer steps spent on warm-up."""
    lr_scheduler_type: str = setting("cosine", choices=SCHEDULES)
    """After warm-up: `constant`, `linear` or `cosine`."""
    clip_grad: float = setting(1.0, range=POSITIVE_OR_INFINITE)
    """Largest gradient norm; larger gradients are scaled down to it."""


@dataclass
class EngineConfig(Section):
    """The train engine. Example: `fsdp.strategy=fsdp2`."""

    strategy: str = "fsdp2"
    """Train engine: `fsdp` and `fsdp2` are the same one, `megatron` is Megatron-Core's."""
    fsdp_size: int = setting(-1, range=COUNT_OR_ALL)
    """Workers that weights and optimizer are cut over; where the run has more, groups of so many hold copies. -1 is all
    of them."""
    ulysses_sequence_parallel_size: int = setting(1, range=ONE_OR_MORE)
    """Workers that share the tokens of each row; it must divide the workers and the model's heads."""
    megatron_config: dict[str, Any] = field(default_factory=dict)
    """How the engine `megatron` cuts a model: `tensor_parallel_size`, `pipeline_parallel_size`, `expert_parallel_size`;
    docs/megatron.md says how."""


@dataclass
class SupervisedTrainerConfig(RunConfig):
    """The run. Example: `trainer.total_epochs=3 trainer.save_freq=100`."""

    project_name: str = "sft"
    """First level of the run directory, and the loggers' project."""
    total_epochs: int = setting(1, range=ONE_OR_MORE)
    """Passes over the training data."""
    export_lora: str = setting("merged", choices=("merged", "adapter"))
    """What that folder holds under LoRA: the `merged` model, or the `adapter` alone."""
