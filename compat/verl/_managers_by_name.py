"""Reward managers by name: verl has two such registries, of managers of batches and of single responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def make_register(known: dict[str, Any], what: str) -> Callable[[str], Callable[[Any], Any]]:
    """The decorator that puts a class into `known`; another class of the same name is an error."""

    def register(name: str) -> Callable[[Any], Any]:
        def decorate(cls: Any) -> Any:
            old = known.get(name)
            if old is not None and (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"{what} {name} has already been registered: {old} vs {cls}")
            known[name] = cls
            return cls

        return decorate

    return register


def make_lookup(known: dict[str, Any]) -> Callable[[str], Any]:
    """The function that gives the class of a name."""

    def get_reward_manager_cls(name: str) -> Any:
        if name not in known:
            raise ValueError(f"Unknown reward manager: {name}. Known: {', '.join(sorted(known))}")
        return known[name]

    return get_reward_manager_cls
