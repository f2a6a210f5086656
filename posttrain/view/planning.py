"""The memory that a run was planned to take, from its stored settings, for the device that is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.tracking.stored import read_settings

MEASURED = {
    "generate": ("gen",),
    "log-probs": ("old_log_prob", "ref", "values", "reward_model"),
    "update": ("update_actor", "update_critic"),
}
"""The stages of a run that a stage of the plan stands for."""


class NoPlan(LookupError):
    """The settings cannot be planned for here; the text says why."""


def plan(folder: Path) -> dict[str, Any]:
    """Planned GB by stage, with the run's stages that each stands for. Loads torch, but no weights."""
    from posttrain.config import load_config
    from posttrain.errors import UserError
    from posttrain.planning.budgets import apply_plan, planner_for
    from posttrain.planning.memory_plan import find_device

    try:
        tree = read_settings(folder / "config.yaml")
        if "actor_rollout_ref" not in tree:
            raise NoPlan("Only runs of the PPO family are planned here; `posttrain plan sft ...` plans others.")
        resolved = load_config(_without_model_code(tree))
        config, device, planner = resolved.config, find_device(resolved.config), planner_for(resolved.config)
        apply_plan(config, device, resolved.explicit, planner)
        found = planner.plan(config, device)
    except (UserError, OSError, TypeError) as error:
        raise NoPlan(f"This run cannot be planned here: {error}") from error
    stages = [
        {"stage": stage, "gb": found.peak(stage) / 1e9, "measured": MEASURED.get(stage, ())} for stage in found.stages
    ]
    words = (
        f"Planned for {found.device.words}: the tensors that the run makes. Measured on a CPU is all that the process "
        "held, torch itself among it."
    )
    return {"words": words, "stages": stages, "peak_gb": found.peak() / 1e9}


def _without_model_code(tree: Any) -> Any:
    """Looking at a run, which may be somebody else's, must not run the code that comes with its model."""
    if not isinstance(tree, dict):
        return tree
    return {key: False if key == "trust_remote_code" else _without_model_code(value) for key, value in tree.items()}
