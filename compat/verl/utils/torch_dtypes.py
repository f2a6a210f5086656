"""Precisions by their many names."""

from __future__ import annotations

from typing import Any

import torch

HALF_LIST = [16, "16", "fp16", "float16", torch.float16]
FLOAT_LIST = [32, "32", "fp32", "float32", torch.float32]
BFLOAT_LIST = ["bf16", "bfloat16", torch.bfloat16]
_NAMES = {
    torch.float16: ("fp16", HALF_LIST),
    torch.float32: ("fp32", FLOAT_LIST),
    torch.bfloat16: ("bf16", BFLOAT_LIST),
}


class PrecisionType:
    """`PrecisionType.to_dtype("bf16")` is torch.bfloat16, `to_str` the way back."""

    HALF, FLOAT, FULL, BFLOAT, MIXED = "16", "32", "64", "bf16", "mixed"

    @staticmethod
    def supported_types() -> list[str]:
        return ["16", "32", "64", "bf16", "mixed"]

    @staticmethod
    def supported_type(precision: Any) -> bool:
        return str(precision) in PrecisionType.supported_types()

    @staticmethod
    def is_fp16(precision: Any) -> bool:
        return precision in HALF_LIST

    @staticmethod
    def is_fp32(precision: Any) -> bool:
        return precision in FLOAT_LIST

    @staticmethod
    def is_bf16(precision: Any) -> bool:
        return precision in BFLOAT_LIST

    @staticmethod
    def to_dtype(precision: Any) -> torch.dtype:
        for dtype, (_, names) in _NAMES.items():
            if precision in names:
                return dtype
        raise RuntimeError(f"unexpected precision: {precision}")

    @staticmethod
    def to_str(precision: Any) -> str:
        if precision not in _NAMES:
            raise RuntimeError(f"unexpected precision: {precision}")
        return _NAMES[precision][0]
