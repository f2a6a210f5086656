"""Section `algorithm`: how rewards become advantages, and what is done about KL."""

from __future__ import annotations

from dataclasses import dataclass, field

from posttrain.config.base import Section


@dataclass
class KLControlConfig(Section):
    """Coefficient of the KL penalty in the reward, fixed or adapted to a target."""

    type: str = "fixed"
    """`fixed` keeps the coefficient; `adaptive` moves it towards `target_kl`."""
    kl_coef: float = 0.001
    """Coefficient of the KL penalty that is taken from the reward."""
    horizon: int = 10000
    """Samples over which the adaptive controller corrects the coefficient."""
    target_kl: float = 0.1
    """KL per response at which the adaptive controller neither raises nor lowers the coefficient."""


@dataclass
class RolloutCorrectionConfig(Section):
    """Importance weights for the gap between the policy that sampled and the policy that is trained."""

    rollout_is: str | None = None
    """`token` or `sequence` importance weights on the policy loss; null switches them off."""
    rollout_is_threshold: float = 2.0
    """Importance weights above this value are truncated to it."""


@dataclass
class AlgorithmConfig(Section):
    """Advantage estimator and KL in the reward. Example: `algorithm.adv_estimator=grpo`."""

    adv_estimator: str = "gae"
    """Name of the advantage estimator: `grpo`, `gae`, or one registered by your own file."""
    gamma: float = 1.0
    """Discount per token in `gae`."""
    lam: float = 1.0
    """Trade-off between bias and variance in `gae`."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide the advantages of a group by the standard deviation of its rewards."""
    use_kl_in_reward: bool = False
    """Subtract a per-token KL penalty from the reward (PPO's way; GRPO puts KL into the loss)."""
    kl_penalty: str = "kl"
    """KL estimate used in the reward: `kl`, `abs`, `mse` or `low_var_kl`."""
    allow_both_kl: bool = False
    """Allow KL in the reward and in the loss at once; without it the pair is refused."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
