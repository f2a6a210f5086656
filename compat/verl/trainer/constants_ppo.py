"""Environment of a run's processes."""

from __future__ import annotations

import os
from typing import Any

from posttrain.trainer.constants_ppo import PPO_ENVIRONMENT
from verl._missing import not_given

__getattr__ = not_given(__name__)
PPO_RAY_RUNTIME_ENV = {"env_vars": dict(PPO_ENVIRONMENT)}


def get_ppo_ray_runtime_env(config: Any = None) -> dict[str, Any]:
    """What `ray.init(runtime_env=...)` takes: the variables that this process has not set itself."""
    variables = {name: value for name, value in PPO_ENVIRONMENT.items() if name not in os.environ}
    return {"env_vars": variables, "working_dir": None}
