"""KL in the reward: a penalty per token, with a fixed coefficient or one that adapts to a target.

    r_t = score_t - coefficient * KL_t
    adaptive, after each batch:  e = clip(KL / target - 1, -0.2, 0.2);  coefficient *= 1 + e * rows / horizon

The KL of a batch is the mean over its responses of the mean over their tokens.

Source: Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593.

When to use: PPO's way of staying near the reference. GRPO puts KL into the loss (see `kl_loss_type`); using both
requires algorithm.allow_both_kl.

Settings: algorithm.use_kl_in_reward, algorithm.kl_penalty, algorithm.kl_ctrl.type, kl_coef, target_kl, horizon.

Watch: actor/reward_kl_penalty (the batch's KL), actor/reward_kl_penalty_coeff (the coefficient that was used).

Signs of failure: an adaptive coefficient that only grows (target_kl is below what the learning rate produces) or
shrinks towards 0 (the policy hardly changes).
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.aggregation import sample_lengths
from posttrain.algorithms.common import AlgorithmError, keep_masked, read_setting, unknown_name
from posttrain.algorithms.kl import kl_penalty
from posttrain.lazy import torch

# The part of a preset that several estimators share.
KL_IN_REWARD: dict[str, Any] = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "actor_rollout_ref.actor.use_kl_loss": False,
}


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """Raises its coefficient while KL is above the target, and lowers it below."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        super().__init__(init_kl_coef)
        for name, value in (("kl_coef", init_kl_coef), ("target_kl", target_kl), ("horizon", horizon)):
            if value <= 0:
                raise AlgorithmError(f"algorithm.kl_ctrl.{name} is {value}; with type=adaptive it must be above 0.")
        self.target_kl, self.horizon = target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt after a batch of `n_steps` responses; a batch longer than the horizon counts as one horizon."""
        # Clipped to 20 %, so that one unusual batch cannot change the coefficient much.
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * min(n_steps / self.horizon, 1.0)


def get_kl_controller(kl_ctrl: Any) -> FixedKLController:
    """Return the controller that the section `algorithm.kl_ctrl` describes."""
    kind = read_setting(kl_ctrl, "type", "fixed")
    kl_coef = read_setting(kl_ctrl, "kl_coef", 0.001)
    if kind == "fixed":
        return FixedKLController(kl_coef)
    if kind == "adaptive":
        target, horizon = read_setting(kl_ctrl, "target_kl", 0.1), read_setting(kl_ctrl, "horizon", 10000)
        return AdaptiveKLController(kl_coef, target, horizon)
    raise unknown_name("KL controller", kind, ("fixed", "adaptive"), "It is set by algorithm.kl_ctrl.type.")


def apply_kl_in_reward(
    token_level_scores: torch.Tensor,
    old_log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    controller: FixedKLController,
    kl_type: str = "kl",
    sample_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return (token_level_rewards, metrics), and adapt the controller for the next batch.

    `sample_B` is the number of each row's sample; None if each row is one.
    """
    kl_BT = keep_masked(kl_penalty(old_log_prob, ref_log_prob, kl_type).detach(), response_mask)
    # Read before the update below: the metric must show what was used on this batch.
    coefficient = controller.value
    rewards_BT = token_level_scores - coefficient * kl_BT

    length_S = sample_lengths(response_mask, sample_B)
    kl_S = kl_BT.double().sum(dim=-1)
    if sample_B is not None:
        kl_S = torch.zeros_like(kl_S).index_add_(0, sample_B, kl_S)
    responses = int((length_S > 0).sum())
    current_kl = float((kl_S / length_S.clamp(min=1)).sum() / max(responses, 1))
    controller.update(current_kl, n_steps=responses)
    return rewards_BT, {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": coefficient}
