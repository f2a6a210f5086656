"""Plugs our attention into transformers: models loaded with `ATTENTION` take packed sequences, paged steps or padding.

`paged_decoder.py` makes paged steps.

Latent attention (MLA: DeepSeek-V2 and V3, GLM-4.7-Flash, MiniCPM-3) has a cache of latents there. A layer makes keys
and values of all heads from one latent of each token, and adds a rotated part that heads share. Only the latent and
that part are cached. A key is K_h c, so a score is q (K_h c) = (K_h' q) c: queries are multiplied by the key matrix of
their head once, and attend to the latents themselves. Weighted latents become outputs by the value matrix of the head.
The products are those of transformers in another order: log-probs differ by rounding.

Shapes: T tokens, H heads, N size of a key without its rotated part, P of that part, V size of a value, R rank (size of
a latent), C = R + P.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.kernels.packed_attention import active_layout
from posttrain.kernels.scores import ScoreChanges, changed_attention
from posttrain.kernels.sequence_parallel import stretch_attention
from posttrain.models.quantized import plain_weight


class PagedStep(Protocol):
    """Attention of a step's tokens, whose keys and values enter the cache; `kernels/decode.py` describes both ways."""

    def attend(
        self,
        layer: Any,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        changes: ScoreChanges,
    ) -> torch.Tensor:
        """(T, H, D)."""
        ...

    def attend_latent(
        self, layer: Any, query_THC: torch.Tensor, latent_TC: torch.Tensor, *, rank: int, scale: float
    ) -> torch.Tensor:
        """(T, H, R): weighted latents."""
        ...

    def recur(self, layer: Any, hidden_1TE: torch.Tensor) -> Any:
        """What a layer with recurrent states gives for the tokens; the states of their sequences move on."""
        ...


_active: PagedStep | None = None


def active_step() -> PagedStep | None:
    """Return what computes attention during a paged step, or None."""
    return _active


@contextmanager
def paged_step(step: PagedStep) -> Iterator[None]:
    """While open, attention is computed by `step`."""
    global _active
    before, _active = _active, step
    try:
        yield
    finally:
        _active = before


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
