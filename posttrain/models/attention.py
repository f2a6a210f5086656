"""Plugs packed attention into transformers: models loaded with `ATTENTION` take packed rows, paged steps or padded
batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.kernels.packed_attention import active_layout, packed_attention
from posttrain.kernels.sequence_parallel import sequence_group, to_heads, to_stretches
from posttrain.models.paged import active_step

ATTENTION = "posttrain"


CHANGES = ("softcap", "s_aux", "position_bias")
"""What models may ask of attention beside scores and softmax, and packed rows cannot answer."""


def _attention(module: torch.nn.Module, query, key, value, attention_mask, scaling=None, **kwargs: Any):
    paged, layout = active_step(), active_layout()
    if paged is None and layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if attention_mask is not None or any(kwargs.get(name) is not None for name in CHANGES):
        raise NotImplementedError("attention with masks, caps, sinks or biases of its own does not take packed rows")
    window = kwargs.get("sliding_window")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    (query, key, value), size = _one_size(query, key, value)
    if paged is not None:
        return paged(module, query, key, value, scaling, window)[..., :size], None
    assert layout is not None
    layout.answered += 1
    query_THD, key_THD, value_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    group = sequence_group()
    if group is None:
        out_THD = packed_attention(query_THD, key_THD, value_THD, layout, scale=scaling, sliding_window=window)
        return out_THD[..., :size].unsqueeze(0), None
    fill = len(query_THD) * group.size() - layout.total  # tokens behind the last, for stretches of equal length
    query_THD, key_THD, value_THD = (
        to_heads(x, group)[: layout.total].contiguous() for x in (query_THD, key_THD, value_THD)
    )
    out_THD = packed_attention(query_THD, key_THD, value_THD, layout, scale=scaling, sliding_window=window)
    filled = F.pad(out_THD[..., :size], (0, 0, 0, 0, 0, fill))
    return to_stretches(filled, group).unsqueeze(0), None


def _one_size(*heads: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Queries, keys and values with heads of one size, and that of the values: latent attention has smaller ones, and
    zeros behind them change nothing."""
    sizes = [x.shape[-1] for x in heads]
    return [
        F.pad(x, (0, max(sizes) - size)) if size < max(sizes) else x for x, size in zip(heads, sizes, strict=True)
    ], sizes[-1]


def _mask(*args: Any, **kwargs: Any):
    """Packed rows and paged steps need no mask: their layout says who sees whom."""
    return None if active_layout() is not None or active_step() is not None else sdpa_mask(*args, **kwargs)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)


def configurations(model: torch.nn.Module) -> list[Any]:
    """The configurations of the model and of all models inside it."""
    return list({id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values())


def set_attention(model: torch.nn.Module, name: str) -> None:
    """The model's attention from now on, by its name in transformers; models that choose theirs when they are made, or
    write it out, take no notice."""
    for config in configurations(model):
        config._attn_implementation_internal = name
