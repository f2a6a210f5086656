"""Megatron-Core on a CPU: the few places where it asks CUDA for something that a CPU run can answer itself.

It is written for CUDA devices, and asks `torch.cuda.current_device()` where to make its buffers; a mixture of experts
copies the counts of its tokens to the host on a CUDA stream. On a CPU the buffers are made there, and the counts are
there already. Nothing else of it is changed: its random numbers, the only other part that needs CUDA, are for dropout,
which is never on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.engine.megatron.package import part


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Inside, Megatron-Core makes its buffers on `device`."""
    if device.type == "cuda":
        yield
        return
    before = torch.cuda.current_device
    torch.cuda.current_device = lambda: device  # pyright: ignore
    try:
        yield
    finally:
        torch.cuda.current_device = before


def settle_experts(device: torch.device) -> None:
    """Lets tokens find their experts without TransformerEngine, whose absence one module does not expect, and on a CPU
    without a CUDA stream."""
    moe_utils = part("transformer.moe.moe_utils")

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if device.type == "cuda":
        return
    dispatcher = part("transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = "none on a CPU"
    dispatcher._maybe_dtoh_and_synchronize = _counts_as_numbers


def _counts_as_numbers(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    """What the dispatcher's own method does, less the copying: counts of tokens as arrays."""
    if point == self.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            counts = getattr(self, name)
            if isinstance(counts, torch.Tensor):
                setattr(self, name, counts.numpy())
    return tokens_per_expert
