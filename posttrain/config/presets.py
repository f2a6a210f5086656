"""The presets' values, in this one place; `python -m posttrain.config.generate` writes them to the YAML tree.

`preset=embedded` is the small task that runs anywhere; `algorithm=grpo` and `algorithm=drgrpo` set an algorithm's keys.
"""

from __future__ import annotations

from typing import Any

_ACTOR = "actor_rollout_ref.actor"

EMBEDDED: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "embedded",
    "data.val_files": "embedded",
    "data.train_batch_size": 200,
    "data.max_prompt_length": 32,
    "data.max_response_length": 4,
    "actor_rollout_ref.model.path": "embedded",
    "actor_rollout_ref.rollout.n": 5,
    f"{_ACTOR}.ppo_mini_batch_size": 50,
    f"{_ACTOR}.optim.lr": 5e-4,
    f"{_ACTOR}.optim.lr_warmup_steps": 10,
    f"{_ACTOR}.optim.lr_scheduler_type": "cosine",
    f"{_ACTOR}.optim.min_lr_ratio": 0.1,
    f"{_ACTOR}.entropy_coeff": 0.02,
    f"{_ACTOR}.clip_ratio_high": 0.4,
    f"{_ACTOR}.use_kl_loss": False,
    "trainer.total_epochs": 1000,
    "trainer.total_training_steps": 200,
    "trainer.test_freq": 10,
    "tracking.samples_freq": 10,
    "trainer.project_name": "embedded",
    "trainer.export_hf": "last",
}

EMBEDDED_SIZES = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{_ACTOR}.ppo_mini_batch_size",
)
"""Of these, what nobody set takes the embedded task's value when neither model nor data was named."""

GRPO: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 5,
    f"{_ACTOR}.use_kl_loss": True,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.kl_loss_type": "low_var_kl",
}

DRGRPO: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": False,
    "actor_rollout_ref.rollout.n": 5,
    f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    f"{_ACTOR}.use_kl_loss": False,
}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "preset/embedded": ("The small task that posttrain makes itself: minutes on a CPU, nothing to download.", EMBEDDED),
    "algorithm/grpo": ("GRPO (arXiv 2402.03300): groups of 5, KL to the reference in the loss.", GRPO),
    "algorithm/drgrpo": ("DrGRPO (arXiv 2503.20783): no division by deviation or length, no KL.", DRGRPO),
}
"""Group file -> (sentence, values by canonical key)."""
