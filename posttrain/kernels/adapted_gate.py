"""The gated part of a layer with adapters beside its matrices: silu(gate + L G) * (up + M U), and its way back.

On a CUDA device what adapters add is made where gate and up are read anyway, forward and backward: as products of
their own the two widest tensors of a layer would be read and written once more each time. The tensor of gate and up
stays as the base made it then. Elsewhere they are added to it.

Shapes: T tokens, I width of the gated layer, R rank.
"""

from __future__ import annotations

import torch

from posttrain.kernels import train
from posttrain.kernels.decode import silu_mul

# (T, R) and (R, I), whose product is added; None adds nothing.
Factors = tuple[torch.Tensor, torch.Tensor] | None


def forward(gate_up_T2I: torch.Tensor, gate: Factors, up: Factors) -> torch.Tensor:
    """(T, I). `backward` must be given the same `gate_up`, whatever this did to it."""
    if gate is None and up is None:
        return silu_mul(gate_up_T2I)
    if train.on_cuda(gate_up_T2I):
        from posttrain.kernels.cuda import adapted_gate

        return adapted_gate.forward(gate_up_T2I, gate, up)
    for half, factors in zip(gate_up_T2I.chunk(2, 1), (gate, up), strict=True):
        if factors is not None:
            half.addmm_(*factors)
    return silu_mul(gate_up_T2I)


def backward(
    grad_TI: torch.Tensor, gate_up_T2I: torch.Tensor, gate: Factors, up: Factors, added: Factors
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the product once more, gradient of gate and up); `added` comes to the gradient of the product."""
    if train.on_cuda(grad_TI) and any(factors is not None for factors in (gate, up, added)):
        from posttrain.kernels.cuda import adapted_gate

        return adapted_gate.backward(grad_TI, gate_up_T2I, gate, up, added)
    if added is not None:
        grad_TI = grad_TI.addmm_(*added)
    return train.gate_backward(grad_TI, gate_up_T2I)
