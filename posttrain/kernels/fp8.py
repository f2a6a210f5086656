"""Products of 8-bit floats (float8_e4m3fn): every row of either side has a scale of its own, sums are float32.

On a CUDA device whose matrix units multiply such numbers, rows are passed as `Quantized`: rounded values and their
scales (`quantized.py`, `cuda/fp8.py`). Everywhere else the rounding is emulated: `round_rows` gives the same rounded
numbers in the tensor's own type, which ordinary products multiply. So a CPU shows what fp8 does to learning,
without its speed.

Shapes: T rows, E numbers of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from posttrain.kernels import cuda
from posttrain.kernels.quantized import Quantized, round_rows

OLDEST = (8, 9)  # compute capability of the first matrix units that multiply fp8


def can_multiply(weight: torch.Tensor) -> bool:
    """Whether the device multiplies this weight in fp8. Its rows and their number must be multiples of 16."""
    # torch's scaled product requires the multiples of 16.
    if not cuda.runs_here(weight) or weight.dtype is torch.float32 or any(size % 16 for size in weight.shape[-2:]):
        return False
    return torch.cuda.get_device_capability(weight.device) >= OLDEST


def product(x_TE: Quantized, weight_FE: Quantized, bias_F: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x times the transposed weight, by the device's own product or a kernel for few rows."""
    from posttrain.kernels.cuda import fp8

    if fp8.takes_few_rows(len(x_TE.values), x_TE.values.device):
        return fp8.multiply_few_rows(x_TE, weight_FE, bias_F, dtype)
    # Sums stay in the matrix unit's accumulator, which keeps about 14 bits of a number: far more than fp8 has, and a
    # tenth faster than moving them out every 128 numbers. vLLM's fp8 products do the same.
    how = {"scale_a": x_TE.scales[:, None], "scale_b": weight_FE.scales[None, :], "use_fast_accum": True}
    scaled_mm: Any = torch._scaled_mm  # pyright: ignore
    return scaled_mm(x_TE.values, weight_FE.values.T, bias=bias_F, out_dtype=dtype, **how)


class Fp8Weight:
    """A copy of a weight in fp8, refilled in place whenever the weight has changed."""

    # In place, because captured decode steps hold its address. Scales follow from the weight alone, with no history, so
    # that a resumed run has the same copy.

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.multiplied = can_multiply(weight)
        self.rounded: torch.Tensor | Quantized = Quantized.like(weight) if self.multiplied else torch.empty_like(weight)

    @torch.no_grad()
    def refill(self) -> None:
        if isinstance(self.rounded, Quantized):
            from posttrain.kernels.cuda import fp8

            fp8.quantize_rows(self.weight, into=self.rounded)
        else:
            self.rounded.copy_(round_rows(self.weight))

    def product(self, x_TE: torch.Tensor | Quantized, bias_F: torch.Tensor | None) -> torch.Tensor:
        if isinstance(self.rounded, Quantized):
            x = x_TE if isinstance(x_TE, Quantized) else quantize_rows(x_TE)
            return product(x, self.rounded, bias_F, self.weight.dtype)
        assert not isinstance(x_TE, Quantized)
        return F.linear(round_rows(x_TE), self.rounded, bias_F)


def quantize_rows(x_TE: torch.Tensor) -> Quantized:
    from posttrain.kernels.cuda import fp8

    return fp8.quantize_rows(x_TE)
