"""Settings: typed sections that hold the only defaults, and strict loading. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.lazy import lazy_names

if TYPE_CHECKING:
    from posttrain.config.environment import check_environment
    from posttrain.config.load import load_config
    from posttrain.config.resolved import ConfigError, Problem, Resolved
    from posttrain.config.root import PPOConfig
    from posttrain.config.trainer import needs_reference

__all__ = [
    "ConfigError",
    "PPOConfig",
    "Problem",
    "Resolved",
    "check_environment",
    "load_config",
    "needs_reference",
]
__getattr__ = lazy_names(
    __name__,
    environment="check_environment",
    load="load_config",
    trainer="needs_reference",
    resolved="ConfigError Problem Resolved",
    root="PPOConfig",
)
