"""Sections that the supervised trainers share: rows, optimizer, engine, and the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.config.base import Section
from posttrain.config.optim import OptimConfig


@dataclass
class RowsConfig(Section):
    """Which rows are learnt from, and how many at a time."""

    train_files: Any = None
    """One path or a list of paths: parquet, json or jsonl; unset, the embedded sums serve."""
    val_files: Any = None
    """Held-out files, as above; null means no validation."""
    train_batch_size: int = 256
    """Rows per optimizer step, over all workers; the loss is a mean over all of them."""
    micro_batch_size_per_gpu: int | None = None
    """Most rows in one forward pass of a worker; null fills `max_token_len_per_gpu`. Results do not depend on it."""
    max_token_len_per_gpu: int = 16384
    """Token budget of one packed forward pass of a worker. Results do not depend on it."""
    max_length: int = 1024
    """Longest row in tokens."""
    truncation: str = "error"
    """What happens to a row that is longer: `error`, `drop` it, or cut it on the `left` or on the `right`; the run says
    how many there were."""
    train_max_samples: int = -1
    """Use at most this many training rows; -1 takes all."""
    val_max_samples: int = -1
    """Use at most this many validation rows; -1 takes all."""
    shuffle: bool = True
    """Draw the rows of an epoch in random order."""
    seed: int | None = None
    """Seed of the order of rows; null takes `trainer.seed`."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, e.g. `{enable_thinking: false}`."""
    system_prompt: str | None = None
    """Put before prompts that are plain strings, as a system message."""


@dataclass
class SupervisedOptimConfig(OptimConfig):
    """AdamW and its schedule. Example: `optim.lr=2e-5`."""

    lr: float = 1e-5
    """Learning rate after warm-up."""
    lr_warmup_steps_ratio: float = 0.05
    """Share of all optimizer steps spent on warm-up."""
    lr_scheduler_type: str = "cosine"
    """After warm-up: `constant`, `linear` or `cosine`."""
    clip_grad: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""


@dataclass
class EngineConfig(Section):
    """The train engine. Example: `fsdp.strategy=fsdp2`."""

    strategy: str = "fsdp2"
    """Train engine: `fsdp` and `fsdp2` are the same one."""


@dataclass
class SupervisedTrainerConfig(Section):
    """The run. Example: `trainer.total_epochs=3 trainer.save_freq=100`."""

    project_name: str = "sft"
    """First level of the run directory, and the loggers' project."""
    experiment_name: str | None = None
    """Second level of the run directory, and the loggers' run; null numbers runs and continues an unfinished one."""
    default_local_dir: str = "outputs"
    """Folder under which run directories are made."""
    total_epochs: int = 1
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Optimizer steps in all; null takes `total_epochs` times the batches of an epoch."""
    save_freq: int = -1
    """Save a checkpoint every so many steps; -1 saves the last step only."""
    test_freq: int = -1
    """Validate every so many steps; -1 validates before training and at the end only."""
    val_before_train: bool = True
    """Validate before the first step."""
    max_ckpt_to_keep: int | None = None
    """Keep this many newest checkpoints (and the best one by validation); null keeps all."""
    export_hf: str = "last"
    """Write a Hugging Face folder into the `last` checkpoint, into `all`, or into `none`."""
    export_lora: str = "merged"
    """What that folder holds under LoRA: the `merged` model, or the `adapter` alone."""
    resume_mode: str = "auto"
    """`auto` continues the run found in the run directory, `disable` refuses to touch one, `resume_path` continues
    `resume_from_path`."""
    resume_from_path: str | None = None
    """Checkpoint folder (`.../global_step_N`) to continue from."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Any of `console` (a line per step), `tensorboard`, `wandb`; `metrics.jsonl` is always written."""
    n_gpus_per_node: int = 1
    """Worker processes per node, one per GPU (or per CPU process)."""
    nnodes: int = 1
    """Machines."""
    device: str = "auto"
    """`auto` (CUDA if there is one), `cpu` or `cuda`."""
    seed: int = 1
    """Seed of the order of rows and of new weights."""
    deterministic: bool = False
    """Use deterministic kernels on CUDA (slower); on CPU runs are deterministic anyway."""
    max_bad_steps: int = 3
    """Stop after this many updates in a row that were skipped because loss or gradient was not finite."""
