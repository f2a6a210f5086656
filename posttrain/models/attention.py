"""Plugs our attention into transformers: models loaded with `ATTENTION` take packed sequences, paged steps or padding.

`paged_decoder.py` makes paged steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.kernels.packed_attention import active_layout
from posttrain.kernels.scores import ScoreChanges, changed_attention
from posttrain.kernels.sequence_parallel import stretch_attention
from posttrain.models.latent import attend_to_latents, has_latents
from posttrain.models.paged_step import active_step


def _last_dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


ATTENTION = "posttrain"


def attention(module: torch.nn.Module, query, key, value, attention_mask, scaling=None, **kwargs: Any):
    paged, layout = active_step(), active_layout()
    changes = ScoreChanges(kwargs.get("softcap"), kwargs.get("s_aux"))
    if paged is None and layout is None and not changes:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError("attention with biases takes no packed rows, score caps or sinks")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if paged is None and layout is None:
        out_RHQD = changed_attention(query, key, value, attention_mask, scale=scaling, changes=changes)
        return out_RHQD.transpose(1, 2).contiguous(), None
    if attention_mask is not None:
        raise NotImplementedError("attention with masks of its own takes no packed rows")
    window = kwargs.get("sliding_window")
    if paged is not None and has_latents(module):
        if changes or window is not None:
            raise NotImplementedError("latents are not attended to with caps, sinks or windows")
        return attend_to_latents(module, query, key, scaling, paged), None
    (query, key, value), size = _one_size(query, key, value)
    if paged is not None:
        heads = (_last_dense(x[0].transpose(0, 1)) for x in (query, key, value))
        out_THD = paged.attend(module, *heads, scale=scaling, window=window, changes=changes)
        return out_THD[None, ..., :size], None
    assert layout is not None
    layout.answered += 1
    query_THD, key_THD, value_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    how = {"scale": scaling, "sliding_window": window, "changes": changes}
    out_THD = stretch_attention(query_THD, key_THD, value_THD, layout, **how)
    return out_THD[..., :size].unsqueeze(0), None


def _one_size(*heads: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    # Latent attention has heads of different sizes; padding with zeros changes nothing. Returns the size of the values.
    sizes = [x.shape[-1] for x in heads]
    return [
        F.pad(x, (0, max(sizes) - size)) if size < max(sizes) else x for x, size in zip(heads, sizes, strict=True)
    ], sizes[-1]


def _mask(*args: Any, **kwargs: Any):
    # Packed sequences and paged steps need no mask: their layout defines which tokens see each other.
    return None if active_layout() is not None or active_step() is not None else sdpa_mask(*args, **kwargs)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, _mask)


def configurations(model: torch.nn.Module) -> list[Any]:
    """Return the configurations of the model and of all models inside it."""
    return list({id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values())


def set_attention(model: torch.nn.Module, name: str) -> None:
    """Set the model's attention by its name in transformers; models that choose theirs when created ignore it."""
    for config in configurations(model):
        config._attn_implementation_internal = name
