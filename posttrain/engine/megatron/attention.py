"""Attention of Megatron-Core's layers over rows packed end to end, by the kernels that all engines here use.

Megatron-Core's own attention over packed rows needs TransformerEngine. Shapes: T packed tokens, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain.kernels.packed_attention import active_layout, packed_attention


class PackedCore(torch.nn.Module):
    """In the place of `core_attention`: inside `packed_rows`, as every pass of an engine is."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """(T, 1, H x D) from (T, 1, H, D): one sequence that holds all rows."""
        layout = active_layout()
        assert layout is not None, "rows of this engine are packed"
        out_THD = packed_attention(query[:, 0], key[:, 0], value[:, 0], layout, scale=self.scale)
        return out_THD.flatten(1)[:, None]
