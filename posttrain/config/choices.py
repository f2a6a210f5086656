"""Settings whose value is one of a few names, the names of what is built in, and the presets.

Names are read from where each is declared. `preset=embedded` is the small task that runs anywhere; `algorithm=grpo`,
`algorithm=dapo`, ... are declared by the algorithms' files. `python -m posttrain.config.generate` writes the presets to
the YAML tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.algorithms.correction import REJECTIONS as REJECTIONS
from posttrain.algorithms.registry import ADV_ESTIMATORS
from posttrain.algorithms.registry import POLICY_LOSSES as _LOSSES
from posttrain.registry import built_in_names

_estimators = {name: estimator for name, estimator in ADV_ESTIMATORS.items() if estimator.is_built_in}
_losses = {name: loss for name, loss in _LOSSES.items() if loss.is_built_in}
ESTIMATORS, POLICY_LOSSES = tuple(_estimators), tuple(_losses)
# Estimators that compare the responses of one prompt: they need `rollout.n` above 1.
GROUP_ESTIMATORS = tuple(name for name, estimator in _estimators.items() if estimator.compares_group)
CRITIC_ESTIMATORS = tuple(name for name, estimator in _estimators.items() if estimator.needs_critic)
ROLLOUT_ENGINES = built_in_names("rollout/engines.py", "register_engine")
PER_RESPONSE = "seq-mean-token-mean"
# Losses whose papers average over each response first.
PER_RESPONSE_LOSSES = tuple(name for name, loss in _losses.items() if loss.loss_agg_mode == PER_RESPONSE)
DEFAULT_GROUP_SIZE = 5

SAMPLERS = built_in_names("data/sampler.py", "register_sampler")
# `console` is the line that a run prints per step; it needs no logger.
LOGGERS = ("console", *built_in_names("tracking/loggers.py", "register_logger"))
# Each is a logger, a package on the index and an extra of posttrain by the same name.
LOGGER_PACKAGES = tuple(name for name in LOGGERS if name not in ("console", "details"))

# Values that are known names elsewhere, with the answer that they get here.
NOT_BUILT_VALUES: dict[tuple[str, str], str] = {
    **{
        ("actor_rollout_ref.rollout.name", name): "this engine is not built; set actor_rollout_ref.rollout.name=native"
        for name in ("trtllm", "dynamo")
    },
    ("trainer.device", "npu"): "Ascend devices need the torch_npu plug-in, which this version does not use; "
    "set trainer.device=auto, cpu or cuda",
}


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

# Those that are not set take the embedded task's value when neither model nor data is named.
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
            for declaration in (*_estimators.values(), *_losses.values())
            for name, preset in declaration.presets.items()
        )
    ),
}
