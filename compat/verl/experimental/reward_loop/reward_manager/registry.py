"""Reward managers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REWARD_MANAGER: dict[str, Any] = {}


def register(name: str) -> Callable[[Any], Any]:
    """Decorator: a subclass of RewardManagerBase, chosen by reward.reward_manager.name=NAME."""

    def decorate(cls: Any) -> Any:
        known = REWARD_MANAGER.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"reward manager {name} has already been registered: {known} vs {cls}")
        REWARD_MANAGER[name] = cls
        return cls

    return decorate


def get_reward_manager_cls(name: str) -> Any:
    """The class of that name."""
    if name not in REWARD_MANAGER:
        raise ValueError(f"Unknown reward manager: {name}. Known: {', '.join(sorted(REWARD_MANAGER))}")
    return REWARD_MANAGER[name]
