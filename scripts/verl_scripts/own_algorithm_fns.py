"""An estimator and a policy loss as verl's users write them: their settings are read from `config`."""

from collections import defaultdict

import torch

from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss


@register_adv_est("median_grpo")
def compute_median_advantage(token_level_rewards, response_mask, index=None, config=None, **kwargs):
    scores = token_level_rewards.sum(dim=-1)
    groups = defaultdict(list)
    for row, uid in enumerate(index):
        groups[uid].append(row)
    with torch.no_grad():
        for rows in groups.values():
            scores[rows] = (scores[rows] - scores[rows].median()) * config.get("median_scale", 1.0)
        advantages = scores.unsqueeze(-1) * response_mask
    return advantages, advantages


@register_policy_loss("soft_clip")
def compute_soft_clip(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kw):
    beta = config.policy_loss.soft_beta
    ratio = torch.exp(log_prob - old_log_prob)
    loss = -advantages * torch.tanh(beta * (ratio - 1)) / beta
    return agg_loss(loss, response_mask, loss_agg_mode), {"actor/beta": beta}
