"""Settings whose value is one of a few names, and the names of what is built in: read from where each is declared."""

from __future__ import annotations

from posttrain.algorithms.aggregation import AGGREGATION_MODES
from posttrain.algorithms.kl import KL_TYPES
from posttrain.algorithms.registry import ADV_ESTIMATORS
from posttrain.algorithms.registry import POLICY_LOSSES as _LOSSES
from posttrain.algorithms.rejection import REJECTIONS as REJECTIONS
from posttrain.config.train_engines import ENGINES, RL
from posttrain.registry import built_in_names

_estimators = {name: estimator for name, estimator in ADV_ESTIMATORS.items() if estimator.is_built_in}
_losses = {name: loss for name, loss in _LOSSES.items() if loss.is_built_in}
ESTIMATORS, POLICY_LOSSES = tuple(_estimators), tuple(_losses)
GROUP_ESTIMATORS = tuple(name for name, estimator in _estimators.items() if estimator.compares_group)
"""Estimators that compare the responses of one prompt: they need `rollout.n` above 1."""
CRITIC_ESTIMATORS = tuple(name for name, estimator in _estimators.items() if estimator.needs_critic)
ROLLOUT_ENGINES = built_in_names("rollout/engines.py", "register_engine")
PER_RESPONSE = "seq-mean-token-mean"
PER_RESPONSE_LOSSES = tuple(name for name, loss in _losses.items() if loss.loss_agg_mode == PER_RESPONSE)
"""Losses whose papers average over each response first."""
_AGGREGATIONS, _KL_TYPES = tuple(AGGREGATION_MODES), tuple(KL_TYPES)
_DTYPES = ("auto", "float32", "bfloat16", "float64")
_SCHEDULES = ("constant", "linear", "cosine")
DEFAULT_GROUP_SIZE = 5

CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.kl_penalty": _KL_TYPES,
    "algorithm.rollout_correction.rollout_is": ("token", "sequence"),
    "data.truncation": ("error", "left", "right", "middle"),
    "actor_rollout_ref.model.quantization": ("nf4",),
    "actor_rollout_ref.model.dtype": _DTYPES,
    RL.strategy: tuple(ENGINES),
    "actor_rollout_ref.actor.loss_agg_mode": _AGGREGATIONS,
    "actor_rollout_ref.actor.kl_loss_type": (*_KL_TYPES, *(f"{name}+" for name in _KL_TYPES)),
    "actor_rollout_ref.actor.old_log_probs": ("auto", "trainer", "rollout"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": _SCHEDULES,
    "critic.loss_agg_mode": _AGGREGATIONS,
    "critic.optim.lr_scheduler_type": _SCHEDULES,
    "reward.sandbox.mode": ("kernel", "unsafe"),
    "reward_model.truncation": ("left", "right", "error"),
    "reward_model.model.dtype": _DTYPES,
    "trainer.export_hf": ("last", "all", "none"),
    "trainer.export_lora": ("adapter", "merged"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.device": ("auto", "cpu", "cuda"),
}
"""Key -> names that it takes (null aside, where the type allows it)."""

SAMPLERS = built_in_names("data/sampler.py", "register_sampler")
LOGGERS = ("console", *built_in_names("tracking/loggers.py", "register_logger"))
"""`console` is the line that a run prints per step; it needs no logger."""
LOGGER_PACKAGES = tuple(name for name in LOGGERS if name not in ("console", "details"))
"""Each is a logger, a package on the index and an extra of posttrain by the same name."""

NOT_BUILT_VALUES: dict[tuple[str, str], str] = {
    ("actor_rollout_ref.actor.strategy", "deepspeed"): "DeepSpeed is not used here: `fsdp2` shards the same state "
    "(weights, gradients, optimizer); set actor_rollout_ref.actor.strategy=fsdp2",
    **{
        ("actor_rollout_ref.rollout.name", name): "this engine is not built; set actor_rollout_ref.rollout.name=native"
        for name in ("trtllm", "dynamo")
    },
    **{
        ("actor_rollout_ref.actor.strategy", name): "this engine is not built in this version; set "
        "actor_rollout_ref.actor.strategy=fsdp2"
        for name in ("veomni", "torchtitan", "automodel", "mindspeed", "fsdp_turbo")
    },
    ("trainer.device", "npu"): "Ascend devices need the torch_npu plug-in, which this version does not use; "
    "set trainer.device=auto, cpu or cuda",
}
"""Values that are known names elsewhere, with the answer that they get here."""
