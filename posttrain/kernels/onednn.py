"""The library that multiplies matrices on a CPU must not change in the middle of a run.

torch gives products to oneDNN until the first one in bfloat16 on a processor without such instructions (older ARM)
fails; from then on, for the rest of the process and for float32 too, it takes its BLAS, whose last bits differ. So
what a run computes would depend on what the process did before it.
"""

from __future__ import annotations

import warnings

import torch

ENOUGH = 64  # rows and columns: smaller products are not given to oneDNN


def fix_product_library() -> None:
    """Make the first bfloat16 product of the process now. If it fails, BLAS is used from here on, which is as fast."""
    ones = torch.ones(ENOUGH, ENOUGH, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a page of C++ frames
        torch.nn.functional.linear(ones, ones, ones[0])
