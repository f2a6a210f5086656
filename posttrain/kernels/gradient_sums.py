"""Gradients of half-precision weights, or of adapters, accumulated in float32 by the products that make them.

A weight may carry a sum, to which the product that makes its gradient is added, instead of returning the gradient to
autograd. The matrix units add in float32 anyway, so nothing is rounded between passes, and no gradient is written, read
and added again. Sums of weights that follow each other lie end to end, so that products of several weights stay one.

Shapes: T tokens, E columns of a weight, C rows of one weight or of several side by side.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch

_SUM, _ADDED, _WITH = "gradient_sum", "gradient_was_added", "gradient_sums_with"


def open_sums(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros in float32 for each of these matrices, to which gradients are added from now on."""
    close_sums(weights)  # an update that failed may have left some
    sizes = [weight.numel() for weight in weights]
    if not sizes:
        return []
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=weights[0].device)
    starts = accumulate(sizes, initial=0)
    sums = [flat[at : at + size].view(w.shape) for w, at, size in zip(weights, starts, sizes, strict=False)]
    for weight, total in zip(weights, sums, strict=True):
        setattr(weight, _SUM, total)
    return sums


def close_sums(weights: Sequence[torch.Tensor]) -> None:
    """Gradients go to autograd again."""
    for weight in weights:
        for name in (_SUM, _ADDED, _WITH):
            if hasattr(weight, name):
                delattr(weight, name)


def added_sum(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight's sum, if anything was added to it: an unused weight has no gradient, so that nothing decays it."""
    return getattr(weight, _SUM) if hasattr(weight, _ADDED) else None


def add_product(weights: Sequence[torch.Tensor], grad_TC: torch.Tensor, x_TE: torch.Tensor, scale: float = 1.0) -> bool:
    """Add scale grad' x, the gradient of these weights side by side, to their sums; False if there are none."""
    sums = _find_sums(weights)
    if sums is None:
        return False
    start, columns = 0, grad_TC.shape[1]
    for total, rows in sums:
        grad_CT = (grad_TC if rows == columns else grad_TC[:, start : start + rows]).T
        start += rows
        if x_TE.dtype is torch.float32:
            total.addmm_(grad_CT, x_TE, alpha=scale)
        else:
            torch.addmm(total, grad_CT, x_TE, alpha=scale, out_dtype=torch.float32, out=total)  # pyright: ignore
    return True


def _find_sums(weights: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]] | None:
    # The sums of these weights side by side and the rows of each; None unless all have one. Cached on the first weight,
    # because it is asked for in every layer of every pass.
    known = getattr(weights[0], _WITH, None)
    if known is not None and len(known[0]) == len(weights) and all(map(operator.is_, known[0], weights)):
        return known[1]
    sums: list[torch.Tensor] = [getattr(weight, _SUM) for weight in weights if hasattr(weight, _SUM)]
    if len(sums) < len(weights):
        return None
    found = [(total, len(total)) for total in (_join_adjacent(sums) if len(sums) > 1 else sums)]
    setattr(weights[0], _WITH, (tuple(weights), found))
    for weight in weights:
        setattr(weight, _ADDED, True)
    return found


def _join_adjacent(sums: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Sums that lie end to end become one tensor.
    found: list[torch.Tensor] = []
    for total in sums:
        last = found[-1] if found else None
        if last is not None and last.data_ptr() + last.numel() * last.element_size() == total.data_ptr():
            found[-1] = last.as_strided((len(last) + len(total), total.shape[1]), last.stride())
        else:
            found.append(total)
    return found
