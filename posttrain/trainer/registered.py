"""Names that this process has registered besides the built-in ones: a script that trains need not name its file."""

from __future__ import annotations

import sys

_REGISTRIES = {
    "algorithm.adv_estimator": ("posttrain.algorithms.registry", "ADV_ESTIMATORS"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("posttrain.algorithms.registry", "POLICY_LOSSES"),
    "data.sampler": ("posttrain.data.sampler", "SAMPLERS"),
    "actor_rollout_ref.rollout.name": ("posttrain.rollout.engines", "ENGINES"),
}


def registered_names() -> dict[str, tuple[str, ...]]:
    """Key -> the names that it takes now; nothing is imported to find out."""
    loaded = {key: (sys.modules.get(module), registry) for key, (module, registry) in _REGISTRIES.items()}
    return {key: tuple(getattr(module, registry)) for key, (module, registry) in loaded.items() if module}
