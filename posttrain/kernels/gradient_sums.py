"""Gradients of half-precision weights, or of adapters beside them, added up in float32 by the products that make them.

A weight may carry a sum: whoever makes its gradient as a product adds to that instead of giving the gradient away. The
matrix units add in float32 anyway, so nothing is rounded between passes, and nothing is written, read and added again.
Sums of weights that follow each other lie end to end, so that products of several weights stay one.

Shapes: T tokens, E columns of a weight, C rows of one weight or of several side by side.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch

_SUM, _ADDED, _WITH = "gradient_sum", "gradient_was_added", "gradient_sums_with"


def open_sums(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros in float32 for each of these matrices; what is made from now on is added there."""
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
    """Gradients are given to autograd again."""
    for weight in weights:
        for name in (_SUM, _ADDED, _WITH):
            if hasattr(weight, name):
                delattr(weight, name)


def added_sum(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight's sum, if anything was added to it: a weight that nobody used has no gradient, not one of zeros."""
    return getattr(weight, _SUM) if hasattr(weight, _ADDED) else None


def add_product(weights: Sequence[torch.Tensor], grad_TC: torch.Tensor, x_TE: torch.Tensor, scale: float = 1.0) -> bool:
    """Add scale grad' x, the gradient of these weights side by side, to their sums; False if there are none."""
    sums = _sums_of(weights)
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


def _sums_of(weights: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]] | None:
    """The sums of these weights side by side, as few as hold them, and the rows of each; None unless all have one.
    Asked for in every pass, and found out in the first."""
    known = getattr(weights[0], _WITH, None)
    if known is not None and len(known[0]) == len(weights) and all(map(operator.is_, known[0], weights)):
        return known[1]
    sums: list[torch.Tensor] = [getattr(weight, _SUM) for weight in weights if hasattr(weight, _SUM)]
    if len(sums) < len(weights):
        return None
    found = [(total, len(total)) for total in (_joined(sums) if len(sums) > 1 else sums)]
    setattr(weights[0], _WITH, (tuple(weights), found))
    for weight in weights:
        setattr(weight, _ADDED, True)
    return found


def _joined(sums: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As few tensors as hold these, in their order: those that lie end to end are one."""
    found: list[torch.Tensor] = []
    for total in sums:
        last = found[-1] if found else None
        if last is not None and last.data_ptr() + last.numel() * last.element_size() == total.data_ptr():
            found[-1] = last.as_strided((len(last) + len(total), total.shape[1]), last.stride())
        else:
            found.append(total)
    return found
