"""`agg_loss`, the KL estimates and their controllers with verl's signatures."""

from __future__ import annotations

from typing import Any

import torch

from posttrain import algorithms
from posttrain.algorithms.kl_in_reward import AdaptiveKLController as _Adaptive
from posttrain.algorithms.kl_in_reward import FixedKLController


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    loss_scale_factor: Any = None,
) -> torch.Tensor:
    """Token losses as one number. The counts are those of the whole mini-batch where `loss_mat` is a part of it;
    `seq-mean-token-sum-norm` divides by the width of the mask unless `loss_scale_factor` is given."""
    if loss_agg_mode not in algorithms.AGGREGATION_MODES:
        raise ValueError(f"Invalid loss_agg_mode: {loss_agg_mode}. Known: {', '.join(algorithms.AGGREGATION_MODES)}")
    count = {"token-mean": batch_num_tokens, "token-sum": 0}.get(loss_agg_mode, global_batch_size)
    if dp_size > 1 and count is None:
        name = "batch_num_tokens" if loss_agg_mode == "token-mean" else "global_batch_size"
        raise ValueError(f"with dp_size {dp_size} the count of the whole batch is needed: {name}")
    loss = algorithms.agg_loss(
        loss_mat,
        loss_mask,
        loss_agg_mode,
        loss_scale_factor=loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor,
        total_tokens=batch_num_tokens,
        total_rows=global_batch_size,
    )
    return loss * dp_size


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """The KL estimate per token: kl (k1), abs, mse (k2), low_var_kl (k3); with `+` the gradient of k2."""
    if kl_penalty.removesuffix("+") not in algorithms.KL_TYPES:
        raise NotImplementedError(f"{kl_penalty}: the KL over the whole vocabulary is not built; take low_var_kl")
    return algorithms.kl_penalty(logprob, ref_logprob, kl_penalty)


def kl_penalty_forward(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    return globals()["kl_penalty"](logprob, ref_logprob, kl_penalty.removesuffix("+"))


def compute_kl_divergence(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, type: str = "low_var_kl") -> torch.Tensor:
    """`kl_penalty` by the name and the argument that guides to verl's update use: the KL estimate per token."""
    return kl_penalty(log_prob, ref_log_prob, type)


class AdaptiveKLController(_Adaptive):
    """Raises its coefficient while KL is above the target and lowers it below, by rows / horizon at a time."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        super().__init__(init_kl_coef, target_kl, horizon)
        self.target = target_kl


def get_kl_controller(kl_ctrl: Any) -> Any:
    """The controller that `algorithm.kl_ctrl` describes."""
    if kl_ctrl.type == "adaptive":
        assert kl_ctrl.horizon > 0, f"algorithm.kl_ctrl.horizon is {kl_ctrl.horizon}; it must be above 0"
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    raise NotImplementedError(f"algorithm.kl_ctrl.type={kl_ctrl.type}: it is fixed or adaptive")


def compute_rewards(token_level_scores: Any, old_log_prob: Any, ref_log_prob: Any, kl_ratio: float) -> Any:
    """Scores less the KL (k1), times the coefficient."""
    return token_level_scores - kl_ratio * kl_penalty(old_log_prob, ref_log_prob, "kl")
