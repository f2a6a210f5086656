"""Checks a run for problems before it starts: `posttrain doctor`, `posttrain plan`, `trainer.dry_run=true`."""

from __future__ import annotations

from typing import Any


def dry_run(resolved: Any) -> Any:
    """For the entry points of the trainers: print the report of these settings instead of training, and return it.

    The checks are imported here, because entry points must start without torch and transformers.
    """
    from posttrain.doctor.command import dry_run as examine

    return examine(resolved)
