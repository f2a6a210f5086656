"""The whole tree of a supervised fine-tuning run, `sft_trainer`."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.model import ModelConfig
from posttrain.config.schema import Section
from posttrain.config.supervised import EngineConfig, RowsConfig, SupervisedOptimConfig, SupervisedTrainerConfig


@dataclass
class MultiturnConfig(Section):
    """Rows that are whole conversations. Example: `data.multiturn.enable=true`."""

    enable: bool | None = None
    """Read the rows as conversations; null does so where rows have the column `messages_key` and no response column."""
    messages_key: str = "messages"
    """Column that holds the conversation: a list of messages with `role` and `content`."""
    tools_key: str = "tools"
    """Column with the tools that the chat template is to show, if rows have one: a list, or JSON text."""


@dataclass
class SFTDataConfig(RowsConfig):
    """Prompts with the responses to learn, or conversations. Example: `data.train_files=data/train.parquet`."""

    prompt_key: str = "prompt"
    """Column that holds the prompt: a string, or a list of chat messages."""
    prompt_dict_keys: list[str] | None = None
    """Keys that lead to the prompt inside that column, where it holds mappings, e.g. `[question]`."""
    response_key: str = "response"
    """Column that holds the response to learn, a string."""
    response_dict_keys: list[str] | None = None
    """Keys that lead to the response inside that column, where it holds mappings."""
    multiturn: MultiturnConfig = field(default_factory=MultiturnConfig)


@dataclass
class SFTConfig(Section):
    """Everything that `posttrain.trainer.fsdp_sft_trainer` can be told."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: SupervisedOptimConfig = field(default_factory=SupervisedOptimConfig)
    fsdp: EngineConfig = field(default_factory=EngineConfig)
    trainer: SupervisedTrainerConfig = field(default_factory=SupervisedTrainerConfig)
