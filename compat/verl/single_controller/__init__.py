"""One program that calls groups of workers: verl's interface, over Ray. Nothing is loaded before it is asked for."""

from __future__ import annotations

from typing import Any

from verl._missing import not_given

_NAMES = ("ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup")


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        from verl.single_controller import base

        return getattr(base, name)
    return not_given(__name__)(name)
