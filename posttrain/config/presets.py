"""The presets: `preset=embedded`, the small task that runs anywhere, and `algorithm=grpo`, `algorithm=dapo`, ..., which
the algorithms' files declare. `python -m posttrain.config.generate` writes them to the YAML tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.algorithms.registry import ADV_ESTIMATORS, POLICY_LOSSES

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

# Of these, what nobody set takes the embedded task's value when neither model nor data was named.
EMBEDDED_SIZES = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    f"{_ACTOR}.ppo_mini_batch_size",
)

# Group file -> (sentence, values by canonical key).
PRESETS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "preset/embedded": ("The small task that posttrain makes itself: minutes on a CPU, nothing to download.", EMBEDDED),
    **dict(
        sorted(
            (f"algorithm/{name}", preset)
            for declaration in (*ADV_ESTIMATORS.values(), *POLICY_LOSSES.values())
            if declaration.is_built_in
            for name, preset in declaration.presets.items()
        )
    ),
}
