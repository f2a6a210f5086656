"""CPPO: drops a token's gradient if it, or the response before it, has moved too far from the policy that sampled.

    p, q = exp(log_prob), exp(old_log_prob);  D_t = |p - q|
    w_t  = 1 - (1 - w_min) * (t - 1) / (T - 1)              t-th of the response's T sampled tokens
    b    = k * quantile_q(D), within [b_min, m * b_min]     the response's own budget per token
    c_t  = min(delta, delta + b * (w_1 + ... + w_(t-1)) - (w_1 D_1 + ... + w_(t-1) D_(t-1)))
    kept : w_t D_t <= c_t, or A (p / q - 1) <= 0: it moves back towards the sampling policy
    loss = -A * stop_gradient(min(p / q, c)) * log_prob on kept tokens, 0 on the others

`dppo_tv` gives every token the same threshold. Here early tokens have a stricter one, because all later tokens depend
on them, and a response that has used up its budget gets a lower one until it is within the budget again.

Only tokens that the policy wrote count as positions, and T is the response's own length, so that neither padding nor
other rows change a loss.

Source: CPPO, arXiv 2606.10968 (its binary total variation). The paper bounds the budget by m = 2, verl by 5.

When to use: several updates per batch, or a rollout engine that differs from the trainer, with long responses, where
small shifts of many early tokens add up.

Settings: actor_rollout_ref.actor.policy_loss.loss_mode=cppo; actor_rollout_ref.actor.clip_ratio is delta, a difference
of probabilities (0.15 for dense models, 0.2 for mixtures); actor_rollout_ref.actor.clip_ratio_c bounds the ratio (20 is
usual); actor_rollout_ref.actor.policy_loss.cppo_w_min, cppo_delta_b (b_min), cppo_delta_b_q, cppo_delta_b_k,
cppo_delta_b_max_mult (m). Unless it is set, actor_rollout_ref.actor.old_log_probs is rollout: the distance is that to
the policy that sampled.

Watch: actor/pg_clipfrac (share of dropped tokens), actor/ratio_bounded, actor/ppo_kl.

Signs of failure: most tokens are dropped (raise cppo_delta_b); nothing is ever dropped and actor/ppo_kl grows (lower
clip_ratio).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.algorithms.common import keep_masked, read_setting, without_gradient
from posttrain.algorithms.losses.shared import TRUSTED_METRICS, safe_log_ratio, trusted_losses
from posttrain.algorithms.registry import loss_settings, register_policy_loss
from posttrain.lazy import torch
from posttrain.settings import ONE_OR_MORE, SHARE, ZERO_OR_MORE, setting


@dataclass
class CPPOSettings:
    """The settings of the loss `cppo`."""

    cppo_w_min: float = setting(0.8, range=SHARE)
    """Weight of a response's last token in `cppo`; the first has 1."""
    cppo_delta_b: float = setting(0.02, range=ZERO_OR_MORE)
    """Smallest budget per token of `cppo`: the weighted mean by which the probabilities of a prefix may move."""
    cppo_delta_b_q: float = setting(0.9, range=SHARE)
    """Quantile of a response's own shifts that `cppo` takes its budget from."""
    cppo_delta_b_k: float = setting(1.0, range=ZERO_OR_MORE)
    """Factor of that quantile in `cppo`."""
    cppo_delta_b_max_mult: float = setting(5.0, range=ONE_OR_MORE)
    """Largest budget of `cppo`, as a multiple of the smallest."""


@register_policy_loss(
    "cppo",
    settings=CPPOSettings,
    reads=("clip_ratio", "clip_ratio_c"),
    metrics=TRUSTED_METRICS,
    old_log_probs="rollout",
)
def compute_policy_loss_cppo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return per-token losses and per-token metrics, each (rows, response length), 0 outside the mask."""
    log_prob, old_log_prob = keep_masked(log_prob, response_mask), keep_masked(old_log_prob, response_mask)
    is_within = within_budget(
        log_prob,
        old_log_prob,
        response_mask,
        read_setting(config, "clip_ratio", 0.2),
        loss_settings(CPPOSettings, config),
    )
    ratio = torch.exp(safe_log_ratio(log_prob, old_log_prob, response_mask)).detach()
    inside = is_within | (advantages * (ratio - 1) <= 0)
    return trusted_losses(old_log_prob, log_prob, advantages, response_mask, inside, config, rollout_is_weights)


@without_gradient
def within_budget(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor, delta: float, own: CPPOSettings
) -> torch.Tensor:
    """Return (B, T) whether a token's weighted shift is below its threshold."""
    mask_BT = mask.bool()
    # float32 at least: sums over thousands of small shifts.
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    shift_BT = keep_masked((log_prob.to(dtype).exp() - old_log_prob.to(dtype).exp()).abs(), mask_BT)
    place_BT = mask_BT.to(dtype).cumsum(-1) - 1
    last_B1 = (mask_BT.sum(-1, keepdim=True) - 1).clamp(min=1)
    weight_BT = keep_masked(1 - (1 - own.cppo_w_min) * place_BT / last_B1, mask_BT)
    spent_BT = weight_BT * shift_BT
    # A row without tokens has no quantile; nothing of it is counted.
    quantile_B1 = shift_BT.masked_fill(~mask_BT, torch.nan).nanquantile(own.cppo_delta_b_q, dim=-1, keepdim=True)
    least = own.cppo_delta_b
    budget_B1 = (own.cppo_delta_b_k * quantile_B1).nan_to_num(least).clamp(least, own.cppo_delta_b_max_mult * least)
    # Of the tokens before this one.
    earned_BT, used_BT = (values.cumsum(-1) - values for values in (budget_B1 * weight_BT, spent_BT))
    return spent_BT <= (delta + earned_BT - used_BT).clamp(max=delta)
