"""Plugs packed attention into transformers: models loaded with `ATTENTION` take packed rows, paged steps or padded
batches."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.kernels.packed_attention import active_layout, packed_attention
from posttrain.kernels.sequence_parallel import sequence_group, to_heads, to_stretches
from posttrain.models.paged import active_step

ATTENTION = "posttrain"


def _attention(module: torch.nn.Module, query, key, value, attention_mask, scaling=None, **kwargs: Any):
    paged = active_step()
    if paged is not None:
        return paged(module, query, key, value, scaling, kwargs.get("sliding_window")), None
    layout = active_layout()
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    window = kwargs.get("sliding_window")
    query_THD, key_THD, value_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    group = sequence_group()
    if group is None:
        out_THD = packed_attention(query_THD, key_THD, value_THD, layout, scale=scaling, sliding_window=window)
        return out_THD.unsqueeze(0), None
    fill = len(query_THD) * group.size() - layout.total  # tokens behind the last, for stretches of equal length
    query_THD, key_THD, value_THD = (
        to_heads(x, group)[: layout.total].contiguous() for x in (query_THD, key_THD, value_THD)
    )
    out_THD = packed_attention(query_THD, key_THD, value_THD, layout, scale=scaling, sliding_window=window)
    filled = torch.nn.functional.pad(out_THD, (0, 0, 0, 0, 0, fill))
    return to_stretches(filled, group).unsqueeze(0), None


def _mask(*args: Any, **kwargs: Any):
    """Packed rows and paged steps need no mask: their layout says who sees whom."""
    return None if active_layout() is not None or active_step() is not None else sdpa_mask(*args, **kwargs)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
