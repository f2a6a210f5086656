"""Rows of 8-bit floats (float8_e4m3fn), each with a scale of its own, and the same rounding emulated in other types.

Shapes: T rows, E numbers of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of float8_e4m3fn
# A row of zeros stays zeros instead of becoming 0 / 0. The smallest normal float32, because gradients of tokens are
# tiny: a mean over 262,144 tokens divides them by that, and with the scales of a weight they may be below 1e-12.
SMALLEST_SCALE = 2.0**-126


class Quantized(NamedTuple):
    """Rows of fp8 values; a row's numbers are its values times its scale."""

    values: torch.Tensor
    scales: torch.Tensor  # float32, the shape of `values` without its last dimension

    @classmethod
    def like(cls, x: torch.Tensor) -> Quantized:
        return cls(torch.empty_like(x, dtype=FP8), x.new_empty(x.shape[:-1], dtype=torch.float32))


def row_scales(x_TE: torch.Tensor) -> torch.Tensor:
    """(..., T, 1), float32: with it the largest number of each row becomes the largest of fp8."""
    return (x_TE.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_(min=SMALLEST_SCALE)


def round_rows(x_TE: torch.Tensor) -> torch.Tensor:
    """The rows as fp8 holds them, in their own type."""
    scale = row_scales(x_TE)
    # Clamped, because values above the largest become NaN in this format: it has no infinity.
    return ((x_TE.float() / scale).clamp_(-LARGEST, LARGEST).to(FP8).float() * scale).to(x_TE.dtype)
