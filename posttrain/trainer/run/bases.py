"""Adapters are continued beside the base that they were trained beside, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.checkpoint.errors import CheckpointError
from posttrain.workers.lora_state import base_problem

_SECTIONS = {"actor": "actor_rollout_ref.model", "critic": "critic.model", "model": "model"}
"""Role -> the settings of its model; `model` is what a supervised run trains."""


def check_bases(path: Path, stored: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """`stored` and `present`: role -> what `lora_state` gave, in the checkpoint and in this run."""
    for role, state in stored.items():
        problem = base_problem(state, present.get(role), _SECTIONS[role])
        if problem is not None:
            raise CheckpointError(
                f"The checkpoint {path} cannot be continued, {role}: {problem}. Give this run the base and settings of "
                "the checkpoint, or start a new run (trainer.experiment_name)."
            )
