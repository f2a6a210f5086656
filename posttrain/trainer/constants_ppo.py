"""Environment of the run's own process and of the processes it starts; applied before torch is imported."""

from __future__ import annotations

import os

PPO_ENVIRONMENT = {
    # Spinning OpenMP threads steal the cores that reward workers and generation share.
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def apply_environment() -> None:
    """Set what the user has not set."""
    for name, value in PPO_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
