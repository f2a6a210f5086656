"""Settings whose value is one of a few names, and the names known now."""

from __future__ import annotations

from posttrain.config.train_engines import ENGINES, RL

GROUP_ESTIMATORS = (
    "grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "gdpo",
    "optimal_token_baseline",
)
"""Estimators that compare the responses of one prompt: they need `rollout.n` above 1."""
CRITIC_ESTIMATORS = ("gae",)
ESTIMATORS = (*GROUP_ESTIMATORS, *CRITIC_ESTIMATORS, "remax", "reinforce_plus_plus")
POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "sapo",
    "cispo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dppo_tv",
    "dppo_kl",
    "dro",
)
REJECTIONS = (
    *(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)
"""Rules of `algorithm.rollout_correction.rollout_rs`."""
ROLLOUT_ENGINES = ("native", "hf", "vllm", "sglang")
PER_RESPONSE_LOSSES = ("gspo", "sapo", "geo_mean")
"""Losses whose papers average over each response first."""
PER_RESPONSE = "seq-mean-token-mean"
_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
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

SAMPLERS = ("default", "curriculum")
LOGGER_PACKAGES = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
"""Each is a logger, a package on the index and an extra of posttrain by the same name."""
LOGGERS = ("console", "details", *LOGGER_PACKAGES)

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
