"""What all algorithm files share: their error, reading a setting from any kind of config, sums under a mask."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from posttrain import registry
from posttrain.errors import UserError
from posttrain.lazy import torch

# Types of `without_gradient`, which keeps the signature of what it decorates.
P = ParamSpec("P")
T = TypeVar("T")


class AlgorithmError(UserError, ValueError):
    """A mistake in how an algorithm was named, configured or called; the text says what to do."""


def file_of(kind: type) -> str:
    """Where a class of the user's is written; its module for one typed into a notebook."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or kind.__module__


def unknown_name(kind: str, name: object, known: Iterable[str], hint: str = "") -> AlgorithmError:
    """Build the error for an unknown name: lists the known ones and the nearest."""
    return AlgorithmError(registry.unknown_name(kind, name, known, hint))


def read_setting(config: Any, name: str, default: Any) -> Any:
    """Return `config.name` of a settings class, a mapping or a plain object; `default` if it is missing or null."""
    if config is None:
        return default
    # Mappings and our own config sections; user code may pass any object with attributes.
    if hasattr(config, "get"):
        value = config.get(name, None)
    else:
        value = getattr(config, name, None)
    return default if value is None else value


def without_gradient(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator like `@torch.no_grad()`, which would import torch together with the module."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def keep_masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` with zeros where the mask is 0, even for NaN or infinity, which a product would keep."""
    # A product with the mask would also give NaN gradients: 0 * inf.
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the values under the mask; 0 under an empty one."""
    return keep_masked(values, mask).sum() / mask.bool().sum().clamp(min=1)
