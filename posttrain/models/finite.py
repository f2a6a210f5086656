"""Weights that are no numbers: said of the weights, before something that computes with them is blamed."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of tensors that hold NaN or infinity."""
    return [name for name, weight in named if weight.is_floating_point() and not bool(torch.isfinite(weight).all())]


def few(names: list[str], most: int = 3) -> str:
    """`a, b and 5 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
