"""The whole tree of a run that trains a reward model, `reward_model_trainer`."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.model import ModelConfig
from posttrain.config.schema import Section
from posttrain.config.supervised import EngineConfig, RowsConfig, SupervisedOptimConfig, SupervisedTrainerConfig
from posttrain.settings import ONE_OR_MORE, ZERO_OR_MORE, setting


@dataclass
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


@dataclass
class PairLossConfig(Section):
    """The Bradley-Terry loss: -log sigmoid(chosen - rejected - margin)."""

    center_coef: float = setting(0.0, range=ZERO_OR_MORE)
    """Adds this times (chosen + rejected)^2, which keeps scores near 0; 0.01 is usual."""


@dataclass
class RewardTrainerConfig(Section):
    """Everything that `posttrain.trainer.reward_model_trainer` can be told."""

    data: PairDataConfig = field(default_factory=PairDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: PairLossConfig = field(default_factory=PairLossConfig)
    optim: SupervisedOptimConfig = field(default_factory=SupervisedOptimConfig)
    fsdp: EngineConfig = field(default_factory=EngineConfig)
    trainer: SupervisedTrainerConfig = field(
        default_factory=lambda: SupervisedTrainerConfig(project_name="reward_model")
    )
