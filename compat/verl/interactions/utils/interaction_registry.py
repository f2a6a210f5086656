"""The interactions of a YAML file."""

from __future__ import annotations

from typing import Any

from posttrain.conversations.adapters import Interactions


def initialize_interactions_from_config(interaction_config_file: str) -> dict[str, Any]:
    """Name -> the object that serves it."""
    return dict(Interactions(interaction_config_file).by_name)
