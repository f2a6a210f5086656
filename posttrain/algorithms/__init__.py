"""Algorithms: pure functions on tensors, found by name. Importing this registers the built-in ones.

Shapes in names: B rows (responses), T tokens of the response, G groups (prompts).
"""

from enum import StrEnum

from posttrain.algorithms.advantages.gae import compute_gae_advantage_return
from posttrain.algorithms.advantages.gdpo import compute_gdpo_outcome_advantage
from posttrain.algorithms.advantages.gpg import compute_gpg_outcome_advantage
from posttrain.algorithms.advantages.grpo import compute_grpo_outcome_advantage
from posttrain.algorithms.advantages.grpo_passk import compute_grpo_passk_outcome_advantage
from posttrain.algorithms.advantages.opo import compute_opo_outcome_advantage
from posttrain.algorithms.advantages.optimal_token_baseline import compute_optimal_token_baseline_advantage
from posttrain.algorithms.advantages.reinforce_plus_plus import compute_reinforce_plus_plus_outcome_advantage
from posttrain.algorithms.advantages.reinforce_plus_plus_baseline import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
)
from posttrain.algorithms.advantages.remax import compute_remax_outcome_advantage
from posttrain.algorithms.advantages.rloo import compute_rloo_outcome_advantage
from posttrain.algorithms.aggregation import AGGREGATION_MODES, agg_loss, aggregation_weights, mask_counts, token_share
from posttrain.algorithms.common import AlgorithmError
from posttrain.algorithms.correction import (
    compute_rollout_correction,
    correction_is_on,
    mismatch_metrics,
    sampled_from,
)
from posttrain.algorithms.kl import KL_TYPES, compute_kl_divergence, kl_penalty
from posttrain.algorithms.kl_in_reward import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_in_reward,
    get_kl_controller,
)
from posttrain.algorithms.losses.cispo import compute_policy_loss_cispo
from posttrain.algorithms.losses.clip_cov import compute_policy_loss_clip_cov
from posttrain.algorithms.losses.dppo_kl import compute_policy_loss_dppo_kl
from posttrain.algorithms.losses.dppo_tv import compute_policy_loss_dppo_tv
from posttrain.algorithms.losses.dro import compute_policy_loss_dro
from posttrain.algorithms.losses.geo_mean import compute_policy_loss_geo_mean
from posttrain.algorithms.losses.gpg import compute_policy_loss_gpg
from posttrain.algorithms.losses.gspo import compute_policy_loss_gspo
from posttrain.algorithms.losses.kl_cov import compute_policy_loss_kl_cov
from posttrain.algorithms.losses.sapo import compute_policy_loss_sapo
from posttrain.algorithms.losses.value import compute_value_loss
from posttrain.algorithms.losses.vanilla import compute_policy_loss_vanilla
from posttrain.algorithms.overlong import overlong_penalty
from posttrain.algorithms.registry import (
    ADV_ESTIMATORS,
    PolicyLoss,
    call_policy_loss,
    compute_advantage,
    critic_estimators,
    get_adv_estimator,
    get_policy_loss,
    group_estimators,
    own_settings,
    prepare_policy_loss,
    register_adv_est,
    register_policy_loss,
    scalar_loss_note,
)

AdvantageEstimator = StrEnum("AdvantageEstimator", {name.upper(): name for name in ADV_ESTIMATORS})
"""The estimators that come with the package."""

__all__ = [
    "AGGREGATION_MODES",
    "KL_TYPES",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "AlgorithmError",
    "FixedKLController",
    "PolicyLoss",
    "agg_loss",
    "aggregation_weights",
    "apply_kl_in_reward",
    "call_policy_loss",
    "compute_advantage",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_kl_divergence",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rollout_correction",
    "compute_value_loss",
    "correction_is_on",
    "critic_estimators",
    "get_adv_estimator",
    "get_kl_controller",
    "get_policy_loss",
    "group_estimators",
    "kl_penalty",
    "mask_counts",
    "mismatch_metrics",
    "overlong_penalty",
    "own_settings",
    "prepare_policy_loss",
    "register_adv_est",
    "register_policy_loss",
    "sampled_from",
    "scalar_loss_note",
    "token_share",
]
