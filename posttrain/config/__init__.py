"""Settings: typed sections that hold the only defaults, and strict loading. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.config.check import needs_reference
    from posttrain.config.environment import check_environment
    from posttrain.config.load import load_config
    from posttrain.config.resolved import ConfigError, Problem, Resolved
    from posttrain.config.root import PPOConfig

__all__ = [
    "ConfigError",
    "PPOConfig",
    "Problem",
    "Resolved",
    "check_environment",
    "load_config",
    "needs_reference",
]

_HOMES = {
    "ConfigError": "resolved",
    "PPOConfig": "root",
    "Problem": "resolved",
    "Resolved": "resolved",
    "check_environment": "environment",
    "load_config": "load",
    "needs_reference": "check",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
