"""Optimal token baseline: every token has its own baseline, weighted by the gradient norms of the responses so far.

    w_t = 1 - 2 p_t + sum over tokens v of p_t(v)^2      squared norm of the gradient of log p_t by the logits
    W_t = w_1 + ... + w_t
    b_t = sum(W_t * G_t) / sum(W_t)                       over the group's responses that have a t-th token
    A_t = G_t - b_t                                       G_t: reward still to come from token t on; returns = G

t counts only tokens that the policy wrote, so tool results do not shift it. If only one response of a group is that
long, there is nothing to compare, and b_t is 0, as in a group of one.

Source: The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL, arXiv 2602.07078.

When to use: long responses or many turns, where the gradient norm spikes and one baseline per response is too coarse.

Settings: algorithm.adv_estimator=optimal_token_baseline, actor_rollout_ref.rollout.n (4 can be enough). It costs two
forward passes over the batch: one for the old log-probs, one for sum p^2.

Watch: actor/grad_norm (no spikes), reward_mean, timing_s/sum_pi_squared.

Signs of failure: as for `rloo`: the scale of the rewards matters, because nothing is divided by a deviation.
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.advantages.groups import group_of_rows, reward_to_go
from posttrain.algorithms.common import AlgorithmError, keep_masked
from posttrain.algorithms.registry import register_adv_est
from posttrain.lazy import torch


@register_adv_est(
    "optimal_token_baseline", reads=(), compares_group=True, needs_sum_pi_squared=True, several_rows="turns"
)
def compute_optimal_token_baseline_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    old_log_probs: torch.Tensor | None = None,
    sum_pi_squared: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), each (rows, response length), 0 outside the mask.

    `sum_pi_squared` (rows, response length) is the sum of the squared probabilities of all next tokens.
    """
    if old_log_probs is None or sum_pi_squared is None:
        raise AlgorithmError("`optimal_token_baseline` needs `old_log_probs` and `sum_pi_squared` of every token.")
    group_B = torch.from_numpy(group_of_rows(index, len(token_level_rewards), "optimal_token_baseline"))
    # On the host in float64, as all group statistics, so that the device changes nothing.
    mask_BT, returns_BT = response_mask.bool().cpu(), reward_to_go(token_level_rewards, response_mask).cpu()
    energy_BT = 1 - 2 * old_log_probs.detach().cpu().double().exp() + sum_pi_squared.detach().cpu().double()
    # Gradients of a response add up token by token, so the weight of a position is a running sum.
    energy_BT = keep_masked(energy_BT, mask_BT).cumsum(dim=-1)

    # Sums over (group, t-th written token): one flat cell each, so that rows are added without a loop.
    width = mask_BT.shape[1]
    place_BT = mask_BT.long().cumsum(dim=-1).sub(1).clamp(min=0)
    cell_BT = group_B[:, None] * width + place_BT
    cells = (int(group_B.max()) + 1) * width

    def cell_sum(values_BT: torch.Tensor) -> torch.Tensor:
        chosen = values_BT[mask_BT]
        return chosen.new_zeros(cells).index_add(0, cell_BT[mask_BT], chosen)[cell_BT]

    weight_BT, rows_BT = cell_sum(energy_BT), cell_sum(mask_BT.double())
    baseline_BT = cell_sum(energy_BT * returns_BT) / weight_BT.clamp(min=1e-12)
    # Tokens that were certain (probability 1) weigh nothing; if all of a cell were, their plain mean serves.
    baseline_BT = torch.where(weight_BT > 1e-12, baseline_BT, cell_sum(returns_BT) / rows_BT.clamp(min=1))
    # A lone response would be its own baseline, and get no gradient.
    baseline_BT = torch.where(rows_BT > 1, baseline_BT, torch.zeros_like(baseline_BT))
    advantages_BT = keep_masked(returns_BT - baseline_BT, mask_BT)
    return advantages_BT.to(token_level_rewards), returns_BT.to(token_level_rewards)
