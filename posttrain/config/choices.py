"""Settings whose value is one of a few names, and the names of what is built in: read from where each is declared."""

from __future__ import annotations

from posttrain.algorithms.registry import ADV_ESTIMATORS
from posttrain.algorithms.registry import POLICY_LOSSES as _LOSSES
from posttrain.algorithms.rejection import REJECTIONS as REJECTIONS
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
