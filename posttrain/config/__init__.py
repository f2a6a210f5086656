"""Settings: typed sections that hold the only defaults, and strict loading. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.lazy import lazy_names

if TYPE_CHECKING:
    from posttrain.config.check import needs_reference as needs_reference
    from posttrain.config.environment import check_environment as check_environment
    from posttrain.config.load import load_config as load_config
    from posttrain.config.resolved import ConfigError as ConfigError
    from posttrain.config.resolved import Problem as Problem
    from posttrain.config.resolved import Resolved as Resolved
    from posttrain.config.root import PPOConfig as PPOConfig

__getattr__ = lazy_names(
    __name__,
    check="needs_reference",
    environment="check_environment",
    load="load_config",
    resolved="ConfigError Problem Resolved",
    root="PPOConfig",
)
