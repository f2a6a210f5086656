"""verl's trainer by name, and the functions that loops written for it use."""

from __future__ import annotations

from typing import Any

from verl._algorithms import aggregation
from verl._missing import not_given
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    process_validation_metrics,
    reduce_metrics,
)
from verl.trainer.ppo.utils import Role, WorkerType, need_critic, need_reference_policy, need_reward_model
from verl.utils.torch_functional import masked_mean

__all__ = [
    "AdvantageEstimator",
    "DataProto",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "Role",
    "WorkerType",
    "agg_loss",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_data_metrics",
    "compute_response_mask",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "need_critic",
    "need_reference_policy",
    "need_reward_model",
    "process_validation_metrics",
    "reduce_metrics",
]


def __getattr__(name: str) -> Any:
    if name == "RayPPOTrainer":
        from verl._trainer import RayPPOTrainer

        return RayPPOTrainer
    return not_given(__name__)(name)


def compute_response_mask(data: Any) -> Any:
    """The attention mask of the responses."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def apply_kl_penalty(data: Any, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[Any, dict[str, float]]:
    """(the batch with `token_level_rewards`: scores less the KL times the controller's value, metrics); the controller
    adapts."""
    batch = data.batch
    mask = batch["response_mask"] if "response_mask" in batch.keys() else compute_response_mask(data)
    kl_BT = aggregation.kl_penalty(batch["old_log_probs"], batch["ref_log_prob"], kl_penalty) * mask
    coefficient = kl_ctrl.value
    batch["token_level_rewards"] = batch["token_level_scores"] - coefficient * kl_BT
    current = float(masked_mean(kl_BT, mask, axis=-1).mean())
    kl_ctrl.update(current_kl=current, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": coefficient}


def compute_advantage(
    data: Any,
    adv_estimator: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Any:
    """The batch with `advantages` and `returns` by the estimator, called as verl calls it."""
    batch, fields = data.batch, data.non_tensor_batch
    if "response_mask" not in batch.keys():
        batch["response_mask"] = compute_response_mask(data)
    arguments: dict[str, Any] = {name: batch[name] for name in ("token_level_rewards", "response_mask")}
    name = core_algos.name_of(adv_estimator)
    if name == "gae":
        arguments |= {"values": batch["values"], "gamma": gamma, "lam": lam}
    elif name == "grpo":
        arguments |= {"index": fields["uid"], "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    else:
        arguments |= {"config": config} | ({"index": fields["uid"]} if "uid" in fields else {})
        if "reward_baselines" in batch.keys():
            arguments["reward_baselines"] = batch["reward_baselines"]
        if name == "gdpo":
            arguments |= {"non_tensor_batch": fields, "batch": batch}
        if name == "optimal_token_baseline":
            arguments |= {key: batch[key] for key in ("sum_pi_squared", "old_log_probs")}
    batch["advantages"], batch["returns"] = core_algos.get_adv_estimator_fn(name)(**arguments)
    if name == "gae" and config is not None and config.get("use_pf_ppo", False):
        data = core_algos.compute_pf_ppo_reweight_data(
            data, config.pf_ppo.get("reweight_method"), config.pf_ppo.get("weight_pow")
        )
    return data
