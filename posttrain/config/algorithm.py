"""Section `algorithm`: how rewards become advantages, and what is done about KL."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from posttrain.algorithms.kl import KL_TYPES
from posttrain.config.schema import ESTIMATOR_KIND, Section, holds_settings_of, section
from posttrain.settings import ONE_OR_MORE, POSITIVE, SHARE, ZERO_OR_MORE, Idle, setting

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
    """Allow KL in the reward and in the loss at once; without it the pair is refused."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    kl_ctrl: KLControlConfig = setting(factory=KLControlConfig, idle=".use_kl_in_reward is False")
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
