"""Environment of a run's processes."""

from __future__ import annotations

import os
from typing import Any

from posttrain.trainer.constants_ppo import PPO_ENVIRONMENT

NVTX_INJECTION_ENV = "NVTX_INJECTION64_PATH"
"""Images of CUDA name libcupti there, which then takes the only place that torch's profiler could have."""
PPO_RAY_RUNTIME_ENV = {"env_vars": dict(PPO_ENVIRONMENT)}


def get_ppo_ray_runtime_env(config: Any = None) -> dict[str, Any]:
    """What `ray.init(runtime_env=...)` takes: the variables that this process has not set itself."""
    variables = {name: value for name, value in PPO_ENVIRONMENT.items() if name not in os.environ}
    profiler = (config.get("global_profiler") if config is not None else None) or {}
    if profiler.get("tool") == "torch" and os.environ.get("VERL_KEEP_NVTX_INJECTION", "0") != "1":
        variables[NVTX_INJECTION_ENV] = "/nonexistent/none.so"  # not empty: start-up hooks fill an empty one again
    return {"env_vars": variables, "working_dir": None}
