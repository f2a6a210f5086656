"""Sections `actor_rollout_ref.actor` and `actor_rollout_ref.ref`: the policy's update and its reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.algorithms.aggregation import AGGREGATION_MODES
from posttrain.algorithms.kl import KL_TYPES
from posttrain.config.optim import FSDPConfig, OptimConfig, RefFSDPConfig
from posttrain.config.schema import LOSS_KIND, Section, holds_settings_of
from posttrain.settings import ABOVE_ONE_OR_INFINITE, ONE_OR_MORE, POSITIVE, POSITIVE_OR_INFINITE, ZERO_OR_MORE, setting


@holds_settings_of(LOSS_KIND, after="loss_mode")
@dataclass
class PolicyLossConfig(Section):
    """Which policy loss is used, and the settings that only one of them has."""  # its file declares them

    loss_mode: str = "vanilla"
    """Name of the policy loss (`posttrain explain` lists them), or one registered by your own file."""


@dataclass
class ActorConfig(Section):
    """The policy's update. Example: `actor_rollout_ref.actor.ppo_mini_batch_size=256`."""

    strategy: str = "fsdp"
    """Train engine: `fsdp` and `fsdp2` are the same one, `megatron` is Megatron-Core's."""
    ppo_mini_batch_size: int = setting(256, range=ONE_OR_MORE)
    """Prompts per optimizer step, over all workers (times `rollout.n` responses)."""
    ppo_micro_batch_size_per_gpu: int | None = setting(None, range=ONE_OR_MORE)
    """Most responses in one forward pass of a worker; null fills `ppo_max_token_len_per_gpu`."""
    ppo_max_token_len_per_gpu: int = setting(16384, range=ONE_OR_MORE)
    """Token budget of one packed forward pass of a worker; unset, a GPU on which it does not fit gets a lower one."""
    ppo_epochs: int = setting(1, range=ONE_OR_MORE)
    """Passes over one batch of responses."""
    shuffle: bool = False
    """Shuffle the rows of a batch before they are split into mini-batches."""
    clip_ratio: float = setting(0.2, range=POSITIVE)
    """Clip range of the probability ratio, on both sides unless the next two are set."""
    clip_ratio_low: float | None = setting(None, range=POSITIVE)
    """Lower clip range; null takes `clip_ratio`."""
    clip_ratio_high: float | None = setting(None, range=POSITIVE_OR_INFINITE)
    """Upper clip range; null takes `clip_ratio`."""
    clip_ratio_c: float = setting(3.0, range=ABOVE_ONE_OR_INFINITE)
    """Dual clip: bound of the loss of a token with negative advantage, in multiples of that advantage."""
    loss_agg_mode: str = setting("token-mean", choices=tuple(AGGREGATION_MODES))
    """How token losses become one number: `token-mean`, `token-sum`, `seq-mean-token-sum`, `seq-mean-token-mean` or
    `seq-mean-token-sum-norm`; unset, the losses `gspo`, `sapo` and `geo_mean` take `seq-mean-token-mean`."""
    loss_scale_factor: float | None = setting(None, range=POSITIVE)
    """Constant of `seq-mean-token-sum-norm`; null takes `data.max_response_length`."""
    use_kl_loss: bool = False
    """Add the KL between policy and reference to the loss."""
    kl_loss_coef: float = setting(0.001, range=ZERO_OR_MORE)
    """Coefficient of the KL loss."""
    kl_loss_type: str = setting("low_var_kl", choices=(*KL_TYPES, *(f"{name}+" for name in KL_TYPES)))
    """KL estimate: `kl` (`k1`), `abs`, `mse` (`k2`), `low_var_kl` (`k3`); a `+` appended gives the unbiased
    gradient."""
    entropy_coeff: float = setting(0.0, range=ZERO_OR_MORE)
    """Entropy bonus: this times the mean entropy is subtracted from the loss."""
    grad_clip: float = setting(1.0, range=POSITIVE_OR_INFINITE)
    """Largest gradient norm; larger gradients are scaled down to it."""
    ulysses_sequence_parallel_size: int = setting(1, range=ONE_OR_MORE)
    """Workers that share the tokens of each row, in the reference too; it must divide the workers and the model's
    heads."""
    old_log_probs: str = setting("auto", choices=("auto", "trainer", "rollout"))
    """Where the old log-probs come from: `trainer` recomputes them, `rollout` takes the engine's, `auto` recomputes
    only when needed."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron_config: dict[str, Any] = field(default_factory=dict)
    """How the engine `megatron` cuts a model: `tensor_parallel_size`, `pipeline_parallel_size`, `expert_parallel_size`;
    docs/megatron.md says how."""


@dataclass
class RefConfig(Section):
    """The frozen reference policy that KL is measured against."""

    fsdp_config: RefFSDPConfig = field(default_factory=RefFSDPConfig)
