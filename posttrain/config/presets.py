"""The presets' values, in this one place; `python -m posttrain.config.generate` writes them to the YAML tree.

`preset=embedded` is the small task that runs anywhere; `algorithm=grpo`, `algorithm=dapo`, ... set an algorithm's keys.
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

DAPO: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.metric": "acc",
    "algorithm.filter_groups.max_num_gen_batches": 10,
    "actor_rollout_ref.rollout.n": 16,
    f"{_ACTOR}.clip_ratio_low": 0.2,
    f"{_ACTOR}.clip_ratio_high": 0.28,
    f"{_ACTOR}.clip_ratio_c": 10.0,
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.use_kl_loss": False,
    "reward.overlong_buffer.enable": True,
    "reward.overlong_buffer.penalty_factor": 1.0,
}

_KL_IN_REWARD: dict[str, Any] = {
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    f"{_ACTOR}.use_kl_loss": False,
}

RLOO: dict[str, Any] = {"algorithm.adv_estimator": "rloo", "actor_rollout_ref.rollout.n": 5, **_KL_IN_REWARD}

REMAX: dict[str, Any] = {"algorithm.adv_estimator": "remax", "actor_rollout_ref.rollout.n": 1, **_KL_IN_REWARD}

REINFORCE_PP: dict[str, Any] = {"algorithm.adv_estimator": "reinforce_plus_plus", **_KL_IN_REWARD}

PPO: dict[str, Any] = {"algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0, **_KL_IN_REWARD}

GSPO: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 5,
    f"{_ACTOR}.policy_loss.loss_mode": "gspo",
    f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    f"{_ACTOR}.clip_ratio_low": 0.0003,
    f"{_ACTOR}.clip_ratio_high": 0.0004,
    f"{_ACTOR}.use_kl_loss": False,
}

CISPO: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 5,
    f"{_ACTOR}.policy_loss.loss_mode": "cispo",
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.clip_ratio_low": 1.0,
    f"{_ACTOR}.clip_ratio_high": 0.2,
    f"{_ACTOR}.use_kl_loss": False,
}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "preset/embedded": ("The small task that posttrain makes itself: minutes on a CPU, nothing to download.", EMBEDDED),
    "algorithm/grpo": ("GRPO (arXiv 2402.03300): groups of 5, KL to the reference in the loss.", GRPO),
    "algorithm/drgrpo": ("DrGRPO (arXiv 2503.20783): no division by deviation or length, no KL.", DRGRPO),
    "algorithm/dapo": (
        "DAPO (arXiv 2503.14476): groups of 16, higher upper clip, dynamic sampling, overlong shaping, no KL.",
        DAPO,
    ),
    "algorithm/rloo": ("RLOO (arXiv 2402.14740): each response against the others, KL in the reward.", RLOO),
    "algorithm/remax": ("ReMax (arXiv 2310.10505): against the greedy response, KL in the reward.", REMAX),
    "algorithm/reinforce_pp": (
        "REINFORCE++ (arXiv 2501.03262): rewards normalised over the batch, KL in the reward.",
        REINFORCE_PP,
    ),
    "algorithm/gspo": ("GSPO (arXiv 2507.18071): GRPO with one ratio per response and a narrow clip.", GSPO),
    "algorithm/cispo": ("CISPO (arXiv 2506.13585): GRPO with clipped importance weights.", CISPO),
    "algorithm/ppo": ("PPO with GAE (arXiv 1707.06347): a critic, KL in the reward.", PPO),
}
"""Group file -> (sentence, values by canonical key)."""
