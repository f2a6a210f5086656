"""The clipped loss of the critic, per token.

    near = clip(V, V_old - c, V_old + c)
    loss = 0.5 * max((V - R)^2, (near - R)^2)           R: returns, c: critic.cliprange_value

A value that moved further than c from the old one has no gradient if moving further would lower the loss.

Source: Proximal Policy Optimization Algorithms, arXiv 1707.06347, in the form of its reference implementation.

When to use: with `gae`, the estimator that trains a critic.

Settings: critic.cliprange_value, critic.loss_agg_mode, critic.optim.lr.

Watch: critic/vf_loss (falls), critic/vf_clipfrac (share of clipped values).

Signs of failure: the clip fraction is near 1: the range is small compared with the returns; raise
critic.cliprange_value or scale the reward.
"""

from __future__ import annotations

from posttrain.algorithms.common import AlgorithmError, keep_masked
from posttrain.lazy import torch


def compute_value_loss(
    vpreds: torch.Tensor,
    values: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor | None = None,
    *,
    cliprange_value: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return per-token losses and metrics of new values `vpreds`; `values` are those before the update.

    With `response_mask`, both are 0 outside it.
    """
    if cliprange_value <= 0:
        raise AlgorithmError(f"critic.cliprange_value is {cliprange_value}; it must be above 0 (customary: 0.5).")
    if response_mask is not None:
        # Outside the mask anything may stand, NaN too: zeros there give loss 0 and gradient 0.
        vpreds, values, returns = (keep_masked(t, response_mask) for t in (vpreds, values, returns))
    # The larger of the two losses is used: a value beyond the range gets no gradient that moves it further away.
    near = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain, clipped = (vpreds - returns) ** 2, (near - returns) ** 2
    losses = 0.5 * torch.maximum(plain, clipped)
    return losses, {"critic/vf_clipfrac": (clipped > plain).to(losses.dtype)}
