"""verl's policy losses: its signatures (one number and a dict of numbers) over posttrain's losses per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from posttrain import algorithms
from posttrain.algorithms.common import read_setting as setting
from posttrain.algorithms.registry import POLICY_LOSSES
from posttrain.protocol import DataProto
from verl._algorithms.aggregation import agg_loss
from verl._algorithms.registries import known_loss
from verl.utils.torch_functional import entropy_from_logits, masked_mean

Loss = tuple[torch.Tensor, dict[str, float]]
CLIP_FRACTIONS = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")


def _by_verl(
    name: str, fixed: str | None = None, always: tuple[str, ...] = CLIP_FRACTIONS, group: str = ""
) -> Callable[..., Loss]:
    """The loss of this name with verl's signature. `fixed` is the aggregation of losses that know only one, `always`
    are metrics that are 0 where there are none, `group` is where verl keeps its settings within `policy_loss`."""
    per_token = POLICY_LOSSES[name]  # posttrain's own, also where the name is registered again later

    def compute(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = fixed or "token-mean",
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> Loss:
        assert config is not None, f"the loss {name} reads its settings from config"
        counts = setting(config, "global_batch_info", {}) or {}
        if group and (own := setting(setting(config, "policy_loss", None), group, None)) is not None:
            config = {key: setting(config, key, None) for key in per_token.reads or ()} | {"policy_loss": own}
        # verl chooses tokens by the covariance with the present log-probs.
        tensors = {"old_log_probs": log_prob.detach(), "advantages": advantages, "response_mask": response_mask}
        prepared = {} if per_token.prepare is None else per_token.prepare(DataProto(tensors), config)
        losses, measured = per_token(
            old_log_prob,
            log_prob,
            advantages,
            response_mask,
            config=config,
            rollout_is_weights=rollout_is_weights,
            **prepared,
        )
        metrics = {key: float(masked_mean(value.detach().float(), response_mask)) for key, value in measured.items()}
        loss = agg_loss(losses, response_mask, fixed or loss_agg_mode, **counts)
        return loss, {key: 0.0 for key in always} | metrics

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{name}"
    compute.__doc__ = f"`{name}` of posttrain.algorithms.losses, as one number and the means of its metrics."
    known_loss(name, compute)
    return compute


compute_policy_loss_vanilla = _by_verl("vanilla")
compute_policy_loss_dppo_tv = _by_verl("dppo_tv")
compute_policy_loss_dppo_kl = _by_verl("dppo_kl")
compute_policy_loss_cppo = _by_verl("cppo", group="cppo")
compute_policy_loss_gspo = _by_verl("gspo")
compute_policy_loss_sapo = _by_verl("sapo", fixed="seq-mean-token-mean")
compute_policy_loss_gpg = _by_verl("gpg", always=())
compute_policy_loss_clip_cov = _by_verl("clip_cov", always=())
compute_policy_loss_kl_cov = _by_verl("kl_cov", always=())
compute_policy_loss_dro = _by_verl("dro", always=())
compute_policy_loss_cispo = _by_verl("cispo")
compute_policy_loss_geo_mean = _by_verl("geo_mean", fixed="seq-mean-token-mean")


def compute_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The clipped loss in its older form: (loss, share clipped, KL, share bounded by the dual clip)."""
    config = {
        "clip_ratio": cliprange,
        "clip_ratio_low": cliprange_low,
        "clip_ratio_high": cliprange_high,
        "clip_ratio_c": clip_ratio_c,
    }
    tensors = (old_log_prob, log_prob, advantages, response_mask)
    loss, metrics = compute_policy_loss_vanilla(*tensors, loss_agg_mode, config)
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    clipped, kl, bounded = (torch.tensor(metrics[name]) for name in names)
    return loss, clipped, kl, bounded


def compute_policy_loss_reinforce(
    rollout_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> Loss:
    """-A x log-prob, times importance weights if given; the ratio is measured only."""
    assert config is not None, "ActorConfig must be provided for REINFORCE loss"
    losses = -advantages * log_prob * (1 if rollout_is_weights is None else rollout_is_weights)
    loss = agg_loss(losses, response_mask, loss_agg_mode, **(setting(config, "global_batch_info", {}) or {}))
    return loss, {"actor/ppo_kl": float(masked_mean((rollout_log_prob - log_prob).detach(), response_mask))}


def compute_policy_loss_bypass_mode(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> Loss:
    """The loss where `old_log_prob` are the rollout's own: the clipped one, or REINFORCE with importance weights.

    `config.policy_loss.rollout_correction` says which, how tokens are weighed, and which are rejected. Weights that
    were computed before are not needed.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct

    assert config is not None, "config is required for bypass_mode loss"
    chosen = (setting(config, "policy_loss", {}) or {}).get("rollout_correction")
    if chosen is None:
        raise ValueError("rollout_correction config not found in policy_loss; loss_mode='bypass_mode' requires it.")
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    given = {name: chosen[name] for name in names if chosen.get(name) is not None}
    weights, kept, measured = correct(log_prob.detach(), old_log_prob, response_mask, **given)
    tensors = (old_log_prob, log_prob, advantages, kept, loss_agg_mode, config)
    match chosen.get("loss_type", "ppo_clip"):
        case "ppo_clip":  # the ratio to the rollout is already in the clipped term
            loss, metrics = compute_policy_loss_vanilla(*tensors)
        case "reinforce":
            taken = None if weights is None else weights.batch["rollout_is_weights"]
            loss, metrics = compute_policy_loss_reinforce(*tensors, taken)
        case other:
            raise ValueError(f"Invalid loss_type: {other}. Must be 'reinforce' or 'ppo_clip'.")
    return loss, metrics | measured


known_loss("bypass_mode", compute_policy_loss_bypass_mode)


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **counts: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the critic's clipped loss, the share of clipped values); `counts` are those of `agg_loss`."""
    losses, measured = algorithms.compute_value_loss(
        vpreds, values, returns, response_mask, cliprange_value=cliprange_value
    )
    clipped = masked_mean(measured["critic/vf_clipfrac"].float(), response_mask)
    return agg_loss(losses, response_mask, loss_agg_mode, **counts), clipped


def compute_entropy_loss(logits: torch.Tensor, response_mask: torch.Tensor, loss_agg_mode: str = "token-mean") -> Any:
    """The entropy of each token's distribution, as one number."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


def compute_pf_ppo_reweight_data(data: Any, reweight_method: str = "pow", weight_pow: float = 2.0) -> Any:
    """As many rows drawn with replacement, by the size of their scores (`pow`), the best and the worst (`max_min`), or
    the best four times as often (`max_random`)."""
    scores = data.batch["token_level_scores"].sum(dim=-1)
    best = scores == scores.max()
    if reweight_method == "pow":
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = (best | (scores == scores.min())).float()
    elif reweight_method == "max_random":
        weights = torch.where(best, 0.4, 0.1)
    else:
        raise ValueError(f"Unsupported reweight_method: {reweight_method}; it is pow, max_min or max_random")
    return data.select_idxs(torch.multinomial(weights + 1e-8, len(scores), replacement=True))
