"""What the tests of Triton's kernels share: where they run, random tensors, and how near is equal."""

from __future__ import annotations

import pytest
import torch

ON_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if ON_CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if ON_CUDA else [torch.float32]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
H, K, D = 4, 2, 16


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int | None = None) -> torch.Tensor:
    if seed is not None:
        torch.manual_seed(seed)
    return torch.randn(*shape).to(DEVICE, dtype)


def near(found: torch.Tensor, wanted: torch.Tensor, *, at: float = 1.0) -> None:
    """Equal up to rounding: of float32, or of two or three bfloat16 operations."""
    half = found.dtype is torch.bfloat16
    limit = (3e-2 if half else 2e-5) * at
    torch.testing.assert_close(found.float(), wanted.float(), rtol=limit, atol=limit)
