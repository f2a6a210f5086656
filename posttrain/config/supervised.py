"""All settings of supervised runs: `sft_trainer` and `reward_model_trainer`, and the sections that they share."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from posttrain.config.model import NO_ADAPTERS, ModelConfig
from posttrain.config.root import OptimConfig
from posttrain.config.schema import Section, section
from posttrain.config.trainer import NO_VALIDATION, UNSHARDED, RunConfig
from posttrain.settings import (
    COUNT_OR_ALL,
    ONE_OR_MORE,
    POSITIVE,
    POSITIVE_OR_INFINITE,
    SCHEDULES,
    SEED,
    SHARE,
    ZERO_OR_MORE,
    Idle,
    setting,
)

_CONSTANT = Idle("the schedule is constant", lambda c: c.optim.lr_scheduler_type == "constant")
_CONVERSATIONS = Idle(
    "rows are read as conversations (data.multiturn.enable)", lambda c: c.data.multiturn.enable is True
)


@section
class RowsConfig(Section):
    """Which rows are learnt from, and how many at a time."""

    train_files: Any = setting(None, is_path=True)
    """One path or a list of paths: parquet, json or jsonl; unset, the embedded sums serve."""
    val_files: Any = setting(None, is_path=True)
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
    val_max_samples: int = setting(-1, range=COUNT_OR_ALL, idle=NO_VALIDATION)
    """Use at most this many validation rows; -1 takes all."""
    shuffle: bool = True
    """Draw the rows of an epoch in random order."""
    seed: int | None = setting(None, range=SEED, idle=".shuffle is False")
    """Seed of the order of rows; null takes `trainer.seed`."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, e.g. `{enable_thinking: false}`."""
    system_prompt: str | None = setting(None, is_literal=True)
    """Put before prompts that are plain strings, as a system message."""


# Fields that other classes declare too have their sentences from there; here they have other defaults.
@section
class SupervisedOptimConfig(OptimConfig):
    """AdamW and its schedule. Example: `optim.lr=2e-5`."""

    lr: float = setting(1e-5, range=POSITIVE)
    lr_warmup_steps_ratio: float = setting(0.05, range=SHARE, idle=".lr_warmup_steps is set")
    """Share of all optimizer steps spent on warm-up."""
    lr_scheduler_type: str = setting("cosine", choices=SCHEDULES)
    min_lr_ratio: float = setting(0.0, range=SHARE, idle=_CONSTANT)
    clip_grad: float = setting(1.0, range=POSITIVE_OR_INFINITE)
    """Largest gradient norm; larger gradients are scaled down to it."""


@section
class EngineConfig(Section):
    """The train engine. Example: `fsdp.strategy=fsdp2`."""

    strategy: str = "fsdp2"
    """Train engine: `fsdp` and `fsdp2` are the same one, `megatron` is Megatron-Core's."""
    fsdp_size: int = setting(-1, range=COUNT_OR_ALL, idle=UNSHARDED)
    """Workers that weights and optimizer are cut over; where the run has more, groups of so many hold copies. -1 is all
    of them."""
    ulysses_sequence_parallel_size: int = setting(1, range=ONE_OR_MORE)
    """Workers that share the tokens of each row; it must divide the workers and the model's heads."""
    megatron_config: dict[str, Any] = field(default_factory=dict)
    """How the engine `megatron` cuts a model: `tensor_parallel_size`, `pipeline_parallel_size`, `expert_parallel_size`;
    docs/megatron.md says how."""


@section
class SupervisedTrainerConfig(RunConfig):
    """The run. Example: `trainer.total_epochs=3 trainer.save_freq=100`."""

    project_name: str = "sft"
    total_epochs: int = setting(1, range=ONE_OR_MORE)
    val_before_train: bool = setting(True, idle=NO_VALIDATION)
    export_lora: str = setting(
        "merged", choices=("merged", "adapter"), idle=(f"model{NO_ADAPTERS}", ".export_hf is none")
    )
    """What that folder holds under LoRA: the `merged` model, or the `adapter` alone."""


@section
class MultiturnConfig(Section):
    """Rows that are whole conversations. Example: `data.multiturn.enable=true`."""

    enable: bool | None = None
    """Read the rows as conversations; null does so where rows have the column `messages_key` and no response column."""
    messages_key: str = setting("messages", idle=".enable is False")
    """Column that holds the conversation: a list of messages with `role` and `content`."""
    tools_key: str = setting("tools", idle=".enable is False")
    """Column with the tools that the chat template is to show, if rows have one: a list, or JSON text."""


@section
class SFTDataConfig(RowsConfig):
    """Prompts with the responses to learn, or conversations. Example: `data.train_files=data/train.parquet`."""

    prompt_key: str = setting("prompt", idle=_CONVERSATIONS)
    """Column that holds the prompt: a string, or a list of chat messages."""
    prompt_dict_keys: list[str] | None = setting(None, idle=_CONVERSATIONS)
    """Keys that lead to the prompt inside that column, where it holds mappings, e.g. `[question]`."""
    response_key: str = setting("response", idle=_CONVERSATIONS)
    """Column that holds the response to learn, a string."""
    response_dict_keys: list[str] | None = setting(None, idle=_CONVERSATIONS)
    """Keys that lead to the response inside that column, where it holds mappings."""
    multiturn: MultiturnConfig = field(default_factory=MultiturnConfig)


@section
class SFTConfig(Section):
    """All settings of `posttrain.trainer.fsdp_sft_trainer`."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: SupervisedOptimConfig = field(default_factory=SupervisedOptimConfig)
    fsdp: EngineConfig = field(default_factory=EngineConfig)
    trainer: SupervisedTrainerConfig = field(default_factory=SupervisedTrainerConfig)


@section
class PairDataConfig(RowsConfig):
    """Pairs of a better and a worse answer. Example: `data.train_files=data/pairs.parquet`."""

    prompt_key: str = "prompt"
    """Column that holds the prompt, a string or a list of chat messages; rows without it hold whole dialogues in the
    next two."""
    chosen_key: str = "chosen"
    """Column with the better answer (or dialogue): a string, or a list of chat messages."""
    rejected_key: str = "rejected"
    """Column with the worse one."""
    margin_key: str | None = None
    """Column with a number by which the better answer should lead at least; null means no margin."""
    train_batch_size: int = setting(64, range=ONE_OR_MORE)
    """Pairs per optimizer step, over all workers; the loss is a mean over all of them."""
    micro_batch_size_per_gpu: int | None = setting(None, range=ONE_OR_MORE)
    """Most pairs in one forward pass of a worker; null fills `max_token_len_per_gpu`. Results do not depend on it."""


@section
class PairLossConfig(Section):
    """The Bradley-Terry loss: -log sigmoid(chosen - rejected - margin)."""

    center_coef: float = setting(0.0, range=ZERO_OR_MORE)
    """Adds this times (chosen + rejected)^2, which keeps scores near 0; 0.01 is usual."""


@section
class RewardTrainerConfig(Section):
    """All settings of `posttrain.trainer.reward_model_trainer`."""

    data: PairDataConfig = field(default_factory=PairDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: PairLossConfig = field(default_factory=PairLossConfig)
    optim: SupervisedOptimConfig = field(default_factory=SupervisedOptimConfig)
    fsdp: EngineConfig = field(default_factory=EngineConfig)
    trainer: SupervisedTrainerConfig = field(
        default_factory=lambda: SupervisedTrainerConfig(project_name="reward_model")
    )
