"""Algorithms: pure functions on tensors, found by name. Importing this registers the built-in ones.

Shapes in names: B rows (responses), T tokens of the response, G groups (prompts).
"""

from posttrain.algorithms.advantages.gae import compute_gae_advantage_return
from posttrain.algorithms.advantages.grpo import compute_grpo_outcome_advantage
from posttrain.algorithms.aggregation import AGGREGATION_MODES, agg_loss, aggregation_weights, mask_counts, token_share
from posttrain.algorithms.calling import PolicyLoss, call_policy_loss, compute_advantage, scalar_loss_note
from posttrain.algorithms.common import AlgorithmError
from posttrain.algorithms.correction import compute_rollout_correction, mismatch_metrics
from posttrain.algorithms.kl import KL_TYPES, compute_kl_divergence, kl_penalty
from posttrain.algorithms.kl_in_reward import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_in_reward,
    get_kl_controller,
)
from posttrain.algorithms.losses.value import compute_value_loss
from posttrain.algorithms.losses.vanilla import compute_policy_loss_vanilla
from posttrain.algorithms.registry import (
    AdvantageEstimator,
    critic_estimators,
    get_adv_estimator,
    get_policy_loss,
    group_estimators,
    register_adv_est,
    register_policy_loss,
)

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
    "compute_grpo_outcome_advantage",
    "compute_kl_divergence",
    "compute_policy_loss_vanilla",
    "compute_rollout_correction",
    "compute_value_loss",
    "critic_estimators",
    "get_adv_estimator",
    "get_kl_controller",
    "get_policy_loss",
    "group_estimators",
    "kl_penalty",
    "mask_counts",
    "mismatch_metrics",
    "register_adv_est",
    "register_policy_loss",
    "scalar_loss_note",
    "token_share",
]
