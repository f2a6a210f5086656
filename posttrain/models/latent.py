"""Latent attention (MLA: DeepSeek-V2 and V3, GLM-4.7-Flash, MiniCPM-3) over a cache of latents.

A layer makes keys and values of all heads from one latent of each token, and adds a rotated part that heads share. Only
the latent and that part are cached. A key is K_h c, so a score is q (K_h c) = (K_h' q) c: queries are multiplied by the
key matrix of their head once, and attend to the latents themselves. Weighted latents become outputs by the value matrix
of the head. The products are those of transformers in another order: log-probs differ by rounding.

Shapes: T tokens, H heads, N size of a key without its rotated part, P of that part, V size of a value, R rank (size of
a latent), C = R + P.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from posttrain.models.paged_step import PagedStep, active_step
from posttrain.models.quantized import plain_weight

LATENT_HEADS = 0  # heads of a cache that holds one latent of each token, for all heads


def latent_layers(module: torch.nn.Module) -> list[Any]:
    """The attention layers whose cache can be one of latents: those that expand them in a method of their own."""
    return [layer for layer in module.modules() if hasattr(type(layer), "expand_kv") and _is_plain(layer)]


def _is_plain(layer: Any) -> bool:
    part = getattr(layer, "kv_b_proj", None)
    base = getattr(part, "base_layer", part)
    return isinstance(base, torch.nn.Linear) and base.bias is None and not hasattr(layer, "indexer")


def keep_latents(module: torch.nn.Module) -> None:
    """Have the layers with latents leave them as they are in paged steps."""
    for layer in latent_layers(module):
        layer.expand_kv = types.MethodType(_unexpanded, layer)


def has_latents(layer: Any) -> bool:
    return "expand_kv" in vars(layer)


def _unexpanded(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if active_step() is None:
        return type(self).expand_kv(self, kv_nope, k_rot)
    return torch.cat([kv_nope, k_rot], -1), kv_nope


def attend_to_latents(
    layer: Any, query: torch.Tensor, latent: torch.Tensor, scale: float, step: PagedStep
) -> torch.Tensor:
    """Attention output (1, T, H, V) of queries (1, H, T, N + P) to latents (1, 1, T, C), which enter the cache."""
    rank, plain = layer.kv_lora_rank, layer.qk_nope_head_dim
    up_HXR = _weight(layer.kv_b_proj).unflatten(0, (query.shape[1], -1))  # X = N + V
    nope_HTN, rotated_HTP = query[0].split([plain, query.shape[-1] - plain], -1)
    latent_query_HTR = _product(nope_HTN, up_HXR[:, :plain])
    query_THC = torch.cat([latent_query_HTR, rotated_HTP], -1).transpose(0, 1)
    found_THR = step.attend_latent(layer, query_THC.contiguous(), latent[0, 0], rank=rank, scale=scale)
    out_HTV = _product(found_THR.transpose(0, 1), up_HXR[:, plain:].transpose(1, 2))
    return out_HTV.transpose(0, 1)[None]


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # A weight with adapters is float32 where the base has half precision, and its products too, as in peft's layers.
    return torch.bmm(x.to(weight.dtype), weight).to(x.dtype)


def _weight(part: Any) -> torch.Tensor:
    # Merged anew in every step: adapters are trained between steps, and merged copies would be stale.
    base = plain_weight(getattr(part, "base_layer", part).weight)
    if not hasattr(part, "base_layer") or part.disable_adapters or part.merged:
        return base
    return base + sum(part.get_delta_weight(name) for name in part.active_adapters if name in part.lora_A)
