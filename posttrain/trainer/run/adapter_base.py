"""Adapters are continued beside the base that they were trained beside, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.checkpoint.errors import CheckpointError

# Role -> the settings of its model; `model` is what a supervised run trains.
_SECTIONS = {"actor": "actor_rollout_ref.model", "critic": "critic.model", "model": "model"}


def check_bases(path: Path, stored: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """`stored` and `present`: role -> what `lora_state` gave, in the checkpoint and in this run."""
    for role, state in stored.items():
        problem = _base_problem(state, present.get(role), _SECTIONS[role])
        if problem is not None:
            raise CheckpointError(
                f"The checkpoint {path} cannot be continued, {role}: {problem}. Give this run the base and settings of "
                "the checkpoint, or start a new run (trainer.experiment_name)."
            )


def _base_problem(stored: Mapping[str, Any], present: Mapping[str, Any] | None, section: str) -> str | None:
    """Why adapters that were `stored` beside a base must not go on beside the one that is there now.

    `section` holds the settings of their model.
    """
    if present is None:
        return f"it holds LoRA adapters only, and this run trains all weights: set {section}.lora_rank"
    was, now = stored["base"], present["base"]
    if was["fingerprint"] != now["fingerprint"]:
        return (
            f"its adapters were trained beside the base {was['path']} (fingerprint {was['fingerprint']}), but the base "
            f"of this run, {now['path']}, has other weights (fingerprint {now['fingerprint']})"
        )
    for name in ("dtype", "quantization"):
        if was[name] != now[name]:
            return f"its base was held with model.{name}={was[name]}, but this run holds it with {now[name]}"
    return None
