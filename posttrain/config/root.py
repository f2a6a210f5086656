"""All settings of a PPO-family run, with the sections of algorithm, optimizer, actor, reference and critic."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from posttrain.algorithms.aggregation import AGGREGATION_MODES
from posttrain.algorithms.kl import KL_TYPES
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import CustomRewardConfig, RewardConfig, RewardModelConfig, RolloutConfig
from posttrain.config.schema import ESTIMATOR_KIND, LOSS_KIND, Section, holds_settings_of, section
from posttrain.config.trainer import ON_CPU, UNSHARDED, DataConfig, OffloadConfig, TrackingConfig, TrainerConfig
from posttrain.settings import (
    ABOVE_ONE_OR_INFINITE,
    BETAS,
    COUNT_OR_ALL,
    COUNT_OR_UNSET,
    ONE_OR_MORE,
    POSITIVE,
    POSITIVE_OR_INFINITE,
    SCHEDULES,
    SHARE,
    ZERO_OR_MORE,
    Idle,
    setting,
)


@section
class OptimConfig(Section):
    """AdamW and its schedule. Example: `actor_rollout_ref.actor.optim.lr=1e-6`."""

    lr: float = setting(1e-6, range=POSITIVE)
    """Learning rate after warm-up."""
    weight_decay: float = setting(0.01, range=ZERO_OR_MORE)
    """Decoupled weight decay, on matrices only (not on norms and biases)."""
    betas: list[float] = setting(factory=lambda: [0.9, 0.999], range=BETAS)
    """Decay of the two moment estimates."""
    eps: float = setting(1e-8, range=POSITIVE)
    """Added to the denominator of the update."""
    lr_warmup_steps: int = setting(-1, range=COUNT_OR_UNSET)
    """Updates (optimizer steps, of which a training step makes one per mini-batch and pass) of linear warm-up; -1 takes
    `lr_warmup_steps_ratio` of all of them."""
    lr_warmup_steps_ratio: float = setting(0.0, range=SHARE, idle=".lr_warmup_steps is set")
    """Share of all updates (optimizer steps) spent on warm-up."""
    lr_scheduler_type: str = setting("constant", choices=SCHEDULES)
    """After warm-up: `constant`, `linear` or `cosine`."""
    min_lr_ratio: float = setting(0.0, range=SHARE, idle=".lr_scheduler_type is constant")
    """`linear` and `cosine` end at this share of `lr`."""


@section
class FSDPConfig(OffloadConfig):
    """Where weights and optimizer state lie between stages."""

    optimizer_offload: bool = setting(False, idle=ON_CPU)
    """Keep the optimizer state in host memory outside the update."""
    fsdp_size: int = setting(-1, range=COUNT_OR_ALL, idle=UNSHARDED)
    """Workers that weights and optimizer are cut over; where the run has more, groups of so many hold copies. -1 is all
    of them."""


_ONE_KL = Idle(
    "there are not two KL terms in this run",
    lambda c: not (c.algorithm.use_kl_in_reward and c.actor_rollout_ref.actor.use_kl_loss),
)


@section
class KLControlConfig(Section):
    """Coefficient of the KL penalty in the reward, fixed or adapted to a target."""

    type: str = setting("fixed", choices=("fixed", "adaptive"))
    """`fixed` keeps the coefficient; `adaptive` moves it towards `target_kl`."""
    kl_coef: float = setting(0.001, range=ZERO_OR_MORE)
    """Coefficient of the KL penalty that is taken from the reward."""
    horizon: int = setting(10000, range=ONE_OR_MORE, idle=".type is fixed")
    """Samples over which the adaptive controller corrects the coefficient."""
    target_kl: float = setting(0.1, range=POSITIVE, idle=".type is fixed")
    """KL per token (the mean over each response's tokens, then over responses) at which the adaptive controller neither
    raises nor lowers the coefficient."""


@section
class RolloutCorrectionConfig(Section):
    """Weights and rejection for the gap between the policy that sampled and the policy that is trained."""

    rollout_is: str | None = setting(None, choices=("token", "sequence"))
    """`token` or `sequence` importance weights on the policy loss; null switches them off."""
    rollout_is_threshold: Any = setting(2.0, idle=".rollout_is is null")
    """A number: weights above it are truncated to it. `low_high`, e.g. `0.5_5.0`: weights outside become 0 (IcePop)."""
    rollout_is_batch_normalize: bool = setting(False, idle=".rollout_is is null")
    """Divide the weights by their mean over the mini-batch."""
    rollout_rs: str | None = None
    """Rejection rules, several with commas: `token_`, `seq_sum_`, `seq_mean_` or `seq_max_` before `k1`, `k2` or
    `k3`; null rejects nothing."""
    rollout_rs_threshold: Any = setting(None, idle=".rollout_rs is null")
    """Threshold of each rule, with commas: a number, for `k1` also `low_high`."""


@section
class FilterGroupsConfig(Section):
    """Dynamic sampling: groups without signal are replaced by further prompts (DAPO)."""

    enable: bool = False
    """Generate until a batch of groups with signal is full; surplus groups serve the next step."""
    metric: str = setting("score", idle=".enable is False")
    """What must differ within a group: `score`, `acc` (right or wrong), or a part that the reward gives."""
    max_num_gen_batches: int = setting(10, range=ZERO_OR_MORE, idle=".enable is False")
    """Most batches generated for one step (0: no limit); groups without signal then fill what is missing."""


@holds_settings_of(ESTIMATOR_KIND, after="gamma")
@section
class AlgorithmConfig(Section):
    """Advantage estimator and KL in the reward. Example: `algorithm.adv_estimator=grpo`."""

    adv_estimator: str = "gae"
    """Name of the advantage estimator (`posttrain explain` lists them), or one registered by your own file."""
    gamma: float = setting(1.0, range=SHARE)
    """Discount per token in `gae` and `reinforce_plus_plus`."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide the advantages of a group by the standard deviation of its rewards."""
    use_kl_in_reward: bool = False
    """Subtract a per-token KL penalty from the reward (PPO's way; GRPO puts KL into the loss)."""
    kl_penalty: str = setting("kl", choices=tuple(KL_TYPES), idle=".use_kl_in_reward is False")
    """KL estimate used in the reward: `kl`, `abs`, `mse` or `low_var_kl`."""
    allow_both_kl: bool = setting(False, idle=_ONE_KL)
    """Allow KL in the reward and in the loss at once; without it the pair is rejected."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    kl_ctrl: KLControlConfig = setting(factory=KLControlConfig, idle=".use_kl_in_reward is False")
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


_BOTH_CLIPS = Idle(
    "clip_ratio_low and clip_ratio_high are both set",
    lambda c: None not in (c.actor_rollout_ref.actor.clip_ratio_low, c.actor_rollout_ref.actor.clip_ratio_high),
)
_NO_KL = Idle(
    "there is no KL term, so that no reference is loaded",
    lambda c: not (c.algorithm.use_kl_in_reward or c.actor_rollout_ref.actor.use_kl_loss),
)
_NO_ADAPTERS = ".lora_rank is 0, so that the critic has no adapters"


@holds_settings_of(LOSS_KIND, after="loss_mode")
@section
class PolicyLossConfig(Section):
    """Which policy loss is used, and the settings that only one of them has."""  # its file declares them

    loss_mode: str = "vanilla"
    """Name of the policy loss (`posttrain explain` lists them), or one registered by your own file."""


@section
class RouterReplayConfig(Section):
    """Which experts of a mixture the trainer's passes take; docs/mixtures.md explains it."""

    mode: str = setting("disabled", choices=("disabled", "R2", "R3"))
    """`R3` takes the experts that each token had in the rollout, in old log-probs and update; `R2` takes those of the
    old log-probs in the update; `disabled` routes anew in every pass."""


@section
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
    clip_ratio: float = setting(0.2, range=POSITIVE, idle=_BOTH_CLIPS)
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
    loss_scale_factor: float | None = setting(
        None, range=POSITIVE, idle=".loss_agg_mode is not seq-mean-token-sum-norm"
    )
    """Constant of `seq-mean-token-sum-norm`; null takes `data.max_response_length`."""
    use_kl_loss: bool = False
    """Add the KL between policy and reference to the loss."""
    kl_loss_coef: float = setting(0.001, range=ZERO_OR_MORE, idle=".use_kl_loss is False")
    """Coefficient of the KL loss."""
    kl_loss_type: str = setting(
        "low_var_kl", choices=(*KL_TYPES, *(f"{name}+" for name in KL_TYPES)), idle=".use_kl_loss is False"
    )
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
    quantization: str | None = setting(None, choices=("fp8",))
    """`fp8` computes products with the frozen base of LoRA in 8 bits, in the update and in log-probs: faster and less
    exact. Adapters keep float32. null: `model.dtype`."""
    router_aux_loss_coef: float = setting(0.0, range=ZERO_OR_MORE)
    """Coefficient of a mixture's load-balance loss; it needs recorded routes (`router_replay.mode`, or
    `rollout.enable_rollout_routing_replay`)."""
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron_config: dict[str, Any] = field(default_factory=dict)
    """How the engine `megatron` cuts a model: `tensor_parallel_size`, `pipeline_parallel_size`, `expert_parallel_size`;
    docs/megatron.md says how."""


@section
class RefConfig(Section):
    """The frozen reference policy that KL is measured against."""

    n_workers: int = setting(0, range=ZERO_OR_MORE)
    """Workers of its own, over which it is cut as the actor is: they compute while the policy computes old log-probs;
    0: it is on the workers that train."""
    fsdp_config: OffloadConfig = field(default_factory=OffloadConfig)


@section
class ActorRolloutRefConfig(Section):
    """The policy in its three roles: trained actor, rollout, frozen reference."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = setting(factory=RefConfig, idle=_NO_KL)


@section
class CriticModelConfig(Section):
    """Which model the critic starts from."""

    path: str | None = setting(None, is_path=True)
    """Folder or hub id, with the policy's vocabulary; null takes the actor's model."""
    lora_rank: int = setting(0, range=ZERO_OR_MORE)
    """Rank of the critic's LoRA adapters; 0 trains all its weights. Its value head is trained whole either way."""
    lora_alpha: int = setting(16, range=POSITIVE, idle=_NO_ADAPTERS)
    """LoRA scale of the critic: adapters are multiplied by alpha / rank."""
    target_modules: Any = setting("all-linear", idle=_NO_ADAPTERS, is_literal=True)
    """Linear modules of the critic that get adapters, as for the actor."""
    exclude_modules: Any = setting(None, idle=_NO_ADAPTERS, is_literal=True)
    """Modules of the critic that get no adapter, as for the actor."""
    use_remove_padding: bool = True
    """Pack rows without padding; false computes padded rows (same result, slower)."""
    enable_gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass; null does as the actor."""


@section
class CriticConfig(Section):
    """The critic's update; built only under an estimator that needs values."""

    n_workers: int = setting(0, range=ZERO_OR_MORE)
    """Workers of its own, over which it is cut: values and updates are computed while the policy computes; 0: it is on
    the workers that train."""
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


@section
class PPOConfig(Section):
    """All settings of `posttrain.trainer.main_ppo`."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = setting(factory=RewardModelConfig, idle="reward_model.enable is False")
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
