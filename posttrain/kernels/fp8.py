"""Products of 8-bit floats (float8_e4m3fn): every row of either side has a scale of its own, sums are float32.

On a CUDA device whose matrix units multiply such numbers, rows are passed as `Quantized`: rounded values and their
scales (`quantized.py`, `cuda/fp8.py`). Everywhere else the rounding is emulated: `round_rows` gives the same rounded
numbers in the tensor's own type, which ordinary products multiply. So a CPU shows what fp8 does to learning,
without its speed.

Shapes: T rows, E numbers of a row.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from posttrain.kernels import cuda
from posttrain.kernels.quantized import Quantized, round_rows, row_scales

# cuBLASLt has no kernel for some sizes that are multiples of 16: on an H200, 80 rows of a weight of 9,216 columns.
UNSUPPORTED = "CUBLAS_STATUS_NOT_SUPPORTED"
OLDEST = (8, 9)  # compute capability of the first matrix units that multiply fp8


def can_multiply(weight: torch.Tensor) -> bool:
    """Whether the device multiplies this weight in fp8. Its rows and their number must be multiples of 16."""
    # torch's scaled product requires the multiples of 16.
    if not cuda.runs_here(weight) or weight.dtype is torch.float32 or any(size % 16 for size in weight.shape[-2:]):
        return False
    return torch.cuda.get_device_capability(weight.device) >= OLDEST


def product(
    x_TE: Quantized,
    weight_FE: Quantized,
    bias_F: torch.Tensor | None,
    dtype: torch.dtype,
    into_TF: torch.Tensor | None = None,
) -> torch.Tensor:
    """x times the transposed weight, by the device's own product or a kernel for few rows; in `into`, if given."""
    from posttrain.kernels.cuda import fp8

    if fp8.takes_few_rows(len(x_TE.values), x_TE.values.device):
        y_TF = fp8.multiply_few_rows(x_TE, weight_FE, bias_F, dtype)
        return y_TF if into_TF is None else into_TF.copy_(y_TF)
    # Sums stay in the matrix unit's accumulator, which keeps about 14 bits of a number: far more than fp8 has, and a
    # tenth faster than moving them out every 128 numbers. vLLM's fp8 products do the same.
    how = {"scale_a": x_TE.scales[:, None], "scale_b": weight_FE.scales[None, :], "use_fast_accum": True}
    scaled_mm: Any = torch._scaled_mm  # pyright: ignore
    if into_TF is not None:
        how["out"] = into_TF
    try:
        return scaled_mm(x_TE.values, weight_FE.values.T, bias=bias_F, out_dtype=dtype, **how)
    except RuntimeError as error:
        if UNSUPPORTED not in str(error):
            raise
    y_TF = _wide_product(x_TE, weight_FE, bias_F).to(dtype)
    return y_TF if into_TF is None else into_TF.copy_(y_TF)


def _wide_product(x_TE: Quantized, weight_FE: Quantized, bias_F: torch.Tensor | None) -> torch.Tensor:
    # The same numbers and float32 sums by matrix units of bfloat16, which holds every fp8 value exactly.
    x, weight = (each.values.to(torch.bfloat16 if each.values.is_cuda else torch.float32) for each in (x_TE, weight_FE))
    wide: dict[str, Any] = {"out_dtype": torch.float32} if x.is_cuda else {}
    y_TF = torch.mm(x, weight.T, **wide) * x_TE.scales[:, None] * weight_FE.scales[None, :]
    return y_TF if bias_F is None else y_TF + bias_F.float()


# Rollout and trainer share the copies of the weights that they share. A copy keeps its weight's memory, so no other
# tensor can get an address that is in here.
_LIVING: WeakValueDictionary[tuple[Any, ...], Fp8Weight] = WeakValueDictionary()


class Fp8Weight:
    """A copy of a weight in fp8, refilled in place whenever the weight has changed."""

    # In place, because captured decode steps hold its address. Scales follow from the weight alone, with no history, so
    # that a resumed run has the same copy.

    @classmethod
    def of(cls, weight: torch.Tensor) -> Fp8Weight:
        """Return the copy of this weight, which others may hold too; a new one is not filled yet."""
        key = (weight.device, weight.data_ptr(), weight.shape, weight.dtype)
        found = None if weight.is_meta else _LIVING.get(key)
        if found is None:
            found = cls(weight)
            if not weight.is_meta:
                _LIVING[key] = found
        return found

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

    def product(
        self, x_TE: torch.Tensor | Quantized, bias_F: torch.Tensor | None, into_TF: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(self.rounded, Quantized):
            x = x_TE if isinstance(x_TE, Quantized) else quantize_rows(x_TE)
            return product(x, self.rounded, bias_F, self.weight.dtype, into_TF)
        assert not isinstance(x_TE, Quantized)
        y_TF = F.linear(round_rows(x_TE), self.rounded, bias_F)
        return y_TF if into_TF is None else into_TF.copy_(y_TF)


class FrozenFp8Weight:
    """A weight that is not trained, in fp8 for both directions of training: y = x W' and dx = dy W.

    The scales of W belong to its rows, over which dy W sums. So they multiply dy before it is rounded by rows, and both
    products read the same rounded numbers.
    """

    def __init__(self, weight_FE: torch.Tensor) -> None:
        self.forward = Fp8Weight.of(weight_FE)
        self.forward.refill()
        self.backward: Quantized | None = None
        rounded = self.forward.rounded
        if isinstance(rounded, Quantized):
            # The matrix units take fp8 only with the dimension that is summed over lying contiguous: one more byte of
            # each weight.
            ones_E = rounded.scales.new_ones(weight_FE.shape[1])
            self.backward = Quantized(rounded.values.T.contiguous(), ones_E)
            self.scales_F = rounded.scales
        else:
            self.scales_F = row_scales(weight_FE)[:, 0]

    def product(
        self, x_TE: torch.Tensor | Quantized, bias_F: torch.Tensor | None, into_TF: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.forward.product(x_TE, bias_F, into_TF)

    def back(self, grad_TF: torch.Tensor) -> torch.Tensor:
        """Return the gradient of x."""
        rounded = self.forward.rounded
        if isinstance(rounded, Quantized):
            assert self.backward is not None
            from posttrain.kernels.cuda import fp8

            given = fp8.quantize_rows(grad_TF, factors_E=self.scales_F)
            return product(given, self.backward, None, grad_TF.dtype)
        # `rounded` holds values times scales here, so the scales are divided out again.
        return (round_rows(grad_TF * self.scales_F) / self.scales_F).to(grad_TF.dtype) @ rounded


def quantize_rows(x_TE: torch.Tensor) -> Quantized:
    from posttrain.kernels.cuda import fp8

    return fp8.quantize_rows(x_TE)
