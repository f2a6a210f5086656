"""Reward managers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REWARD_MANAGER_REGISTRY: dict[str, Any] = {}


def register(name: str) -> Callable[[Any], Any]:
    """Decorator: a class that scores whole batches, chosen by reward_model.reward_manager=NAME."""

    def decorate(cls: Any) -> Any:
        known = REWARD_MANAGER_REGISTRY.get(name)
        same = known is not None and (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
        if known is not None and not same:
            raise ValueError(f"Reward manager {name} has already been registered: {known} vs {cls}")
        REWARD_MANAGER_REGISTRY[name] = cls
        return cls

    return decorate


def get_reward_manager_cls(name: str) -> Any:
    if name not in REWARD_MANAGER_REGISTRY:
        raise ValueError(f"Unknown reward manager: {name}. Known: {', '.join(sorted(REWARD_MANAGER_REGISTRY))}")
    return REWARD_MANAGER_REGISTRY[name]
