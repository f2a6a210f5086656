"""Section `critic`: the value model of `gae`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.algorithms.aggregation import AGGREGATION_MODES
from posttrain.config.optim import FSDPConfig, OptimConfig
from posttrain.config.schema import Section
from posttrain.settings import ONE_OR_MORE, POSITIVE, POSITIVE_OR_INFINITE, ZERO_OR_MORE, setting


@dataclass
class CriticModelConfig(Section):
    """Which model the critic starts from."""

    path: str | None = None
    """Folder or hub id, with the policy's vocabulary; null takes the actor's model."""
    lora_rank: int = setting(0, range=ZERO_OR_MORE)
    """Rank of the critic's LoRA adapters; 0 trains all its weights. Its value head is trained whole either way."""
    lora_alpha: int = setting(16, range=POSITIVE)
    """LoRA scale of the critic: adapters are multiplied by alpha / rank."""
    target_modules: Any = "all-linear"
    """Linear modules of the critic that get adapters, as for the actor."""
    exclude_modules: Any = None
    """Modules of the critic that get no adapter, as for the actor."""
    use_remove_padding: bool = True
    """Pack rows without padding; false computes padded rows (same result, slower)."""
    enable_gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass; null does as the actor."""


@dataclass
class CriticConfig(Section):
    """The critic's update; built only under an estimator that needs values."""

    ppo_mini_batch_size: int | None = setting(None, range=ONE_OR_MORE)
    """Prompts per optimizer step; null takes the actor's."""
    ppo_micro_batch_size_per_gpu: int | None = setting(None, range=ONE_OR_MORE)
    """Most responses in one forward pass of a worker; null fills the token budget."""
    ppo_max_token_len_per_gpu: int = setting(16384, range=ONE_OR_MORE)
    """Token budget of one packed forward pass of a worker; unset, a GPU on which it does not fit gets a lower one."""
    ppo_epochs: int | None = setting(None, range=ONE_OR_MORE)
    """Passes over one batch; null takes the actor's."""
    shuffle: bool = False
    """Shuffle the rows of a batch before they are split into mini-batches."""
    cliprange_value: float = setting(0.5, range=POSITIVE_OR_INFINITE)
    """Values that moved further than this from the old ones get the clipped loss."""
    loss_agg_mode: str = setting("token-mean", choices=tuple(AGGREGATION_MODES))
    """How token losses become one number, as for the actor."""
    grad_clip: float = setting(1.0, range=POSITIVE_OR_INFINITE)
    """Largest gradient norm; larger gradients are scaled down to it."""
    ulysses_sequence_parallel_size: int = setting(1, range=ONE_OR_MORE)
    """Workers that share the tokens of each row, as for the actor."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
