"""What all algorithm files share: their error, reading a setting from any kind of config, sums under a mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from posttrain import registry
from posttrain.errors import UserError
from posttrain.lazy import torch

P = ParamSpec("P")
T = TypeVar("T")


class AlgorithmError(UserError, ValueError):
    """A mistake in how an algorithm was named, set up or called; the text says what to do about it."""


def unknown_name(kind: str, name: object, known: Iterable[str], hint: str = "") -> AlgorithmError:
    """The error for a name that does not exist: lists the known ones and the nearest."""
    return AlgorithmError(registry.unknown_name(kind, name, known, hint))


def read_setting(config: Any, name: str, default: Any) -> Any:
    """`config.name` of a settings class, a mapping or a plain object; `default` where it is missing or null."""
    if config is None:
        return default
    if hasattr(config, "get"):
        value = config.get(name, None)
    else:
        value = getattr(config, name, None)
    return default if value is None else value


def without_gradient(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator, as `@torch.no_grad()`, which would import torch together with the module."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def keep_masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with zeros where the mask is 0, even over NaN or infinity, which a product would let through."""
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the values under the mask; 0 under an empty one."""
    return keep_masked(values, mask).sum() / mask.bool().sum().clamp(min=1)
