"""Estimates of the KL divergence between policy and reference per token, from log-probs of sampled tokens.

    d = log_prob - ref_log_prob

    k1, kl            d                     unbiased, noisy, can be negative; as a loss its expected gradient is 0
    abs               |d|                   never negative, not a KL
    k2, mse           d^2 / 2               small bias; the gradient is correct
    k3, low_var_kl    exp(-d) + d - 1       unbiased, never negative, little noise; the gradient is biased
    any of them with `+` appended           this value, with the gradient of k2

Source: John Schulman, Approximating KL Divergence (2020); gradients: arXiv 2506.09477.

When to use: `low_var_kl` in the loss is GRPO's choice; `k3+` has the same value and an unbiased gradient; `kl` is
PPO's choice in the reward, where no gradient is taken.

Settings: actor_rollout_ref.actor.use_kl_loss, kl_loss_coef, kl_loss_type; in the reward algorithm.use_kl_in_reward,
algorithm.kl_penalty, algorithm.kl_ctrl.*

Watch: kl_loss (0 at the first step; usually 0.001 to 0.1 later).

Signs of failure: kl_loss keeps growing (raise kl_loss_coef, lower the learning rate); kl_loss is not 0 at step 0
(policy and reference are not the same model, or the temperatures differ).
"""

from __future__ import annotations

from collections.abc import Callable

from posttrain.algorithms.common import unknown_name
from posttrain.lazy import torch

# One token with a very unlikely reference must stay finite and must not outweigh a whole batch.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def k1(d: torch.Tensor) -> torch.Tensor:
    """`k1` (also `kl`): d = log_prob - ref_log_prob. Unbiased and noisy; negative for single tokens.

    It is PPO's usual choice in the reward. In the loss its expected gradient is 0, so it regularises nothing: use `k1+`
    there, which has this value and the gradient of `k2`.
    """
    return d


def absolute(d: torch.Tensor) -> torch.Tensor:
    """`abs`: |d|, the distance between the two log-probs. Never negative; grows like a distance, not like a KL.

    Its gradient has the same size for every token that differs at all. `abs+` has the gradient of `k2`.
    """
    return d.abs()


def k2(d: torch.Tensor) -> torch.Tensor:
    """`k2` (also `mse`): d^2 / 2. Never negative; slightly biased as a value, unbiased as a gradient on-policy.

    `k2+` is the same.
    """
    return 0.5 * d * d


def k3(d: torch.Tensor) -> torch.Tensor:
    """`k3` (also `low_var_kl`): exp(-d) + d - 1. Unbiased, never negative, little noise: the choice of GRPO.

    Its gradient is biased; `k3+` keeps the value and has the gradient of `k2`. As usual, d is limited to 20 and the
    value to 10, so that one token that the reference finds impossible cannot dominate a step.
    """
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1, because exp(-d) - 1 loses all digits near d = 0, where most tokens are.
    return (torch.expm1(-d) + d).clamp(max=MAX_K3)


KL_TYPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
}


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Return the KL estimate per token of the named type; with `+`, its gradient is that of `k2`."""
    name, plus = kl_type.removesuffix("+"), kl_type.endswith("+")
    if name not in KL_TYPES:
        hint = "Each also with `+` appended (gradient of k2). Set by actor_rollout_ref.actor.kl_loss_type in the "
        raise unknown_name("KL type", kl_type, KL_TYPES, hint + "loss and algorithm.kl_penalty in the reward.")
    d = logprob - ref_logprob
    value = KL_TYPES[name](d)
    if not plus:
        return value
    # The difference is 0 in value, and its gradient is that of k2.
    carrier = k2(d)
    return value.detach() + (carrier - carrier.detach())


def compute_kl_divergence(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, type: str = "low_var_kl") -> torch.Tensor:
    """`kl_penalty` under the name and signature that tutorials use."""
    return kl_penalty(log_prob, ref_log_prob, type)
