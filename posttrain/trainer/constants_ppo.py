"""Environment of the run's own process and of the processes it starts; applied before torch is imported."""

from __future__ import annotations

import os

PPO_ENVIRONMENT = {
    # OpenMP threads wait a moment for more work, then sleep: those that spin on steal the cores of reward workers.
    "GOMP_SPINCOUNT": "20000",
    "TOKENIZERS_PARALLELISM": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def apply_environment() -> None:
    """Set what the user has not set."""
    for name, value in PPO_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
