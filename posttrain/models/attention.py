"""Plugs our attention into transformers: models loaded with `ATTENTION` take packed sequences, paged steps or padding.

`PagedDecoder` is the general way to decode with a paged cache: it runs transformers' own module, whatever its layers do
(experts, post-norms, learned positions), if its attention goes through transformers' attention interface. `decoder.py`
is the fast way for common architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from posttrain.kernels.decode import LayerCache, StepTokens, attention
from posttrain.kernels.packed_attention import active_layout
from posttrain.kernels.scores import ScoreChanges, changed_attention
from posttrain.kernels.sequence_parallel import stretch_attention
from posttrain.kernels.whole_step import DecodeRows
from posttrain.models.adapter_files import load_module
from posttrain.models.forward import decoder_of, logits_of
from posttrain.models.routing import RoutePass, routed

Answer = Callable[..., torch.Tensor]
_active: Answer | None = None


def active_step() -> Answer | None:
    """Return what computes attention during a paged step, or None."""
    return _active


@contextmanager
def _answering(answer: Answer) -> Iterator[None]:
    global _active
    before, _active = _active, answer
    try:
        yield
    finally:
        _active = before


class PagedDecoder:
    """Computes hidden states and logits of flat tokens with the module itself."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def hidden(
        self,
        step: StepTokens,
        caches: Callable[[int, int, int], LayerCache],
        wanted_N: torch.Tensor | None = None,
        routes_PLK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return final hidden states of the wanted tokens (all, if None); all keys and values enter the caches, and the
        chosen experts `routes_PLK`, by the tokens' places in the cache."""
        routes = None if routes_PLK is None else RoutePass(keeps=True)

        def answer(layer: Any, query, key, value, scale: float, window: int | None, changes: ScoreChanges):
            query, key, value = (_last_dense(x[0].transpose(0, 1)) for x in (query, key, value))
            cache = caches(layer.layer_idx, key.shape[1], key.shape[2])
            out = attention(query, key, value, cache, step, scale=scale, window=window, changes=changes)
            return out.view(1, *query.shape)

        with _answering(answer), routed(routes):
            output = decoder_of(self.module)(
                input_ids=step.ids_T[None], position_ids=step.positions_T.long()[None], use_cache=False
            )
        if routes_PLK is not None and routes is not None:
            routes_PLK[step.slots_T] = routes.chosen_TLK().to(routes_PLK.dtype)
        hidden_TE = output.last_hidden_state[0]
        return hidden_TE if wanted_N is None else hidden_TE[wanted_N]

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return logits_of(self.module, hidden_NE)

    def decode(
        self, rows: DecodeRows, caches: Callable[[int, int, int], LayerCache], routes_PLK: torch.Tensor | None = None
    ) -> bool:
        """Return False: the module is called once per token."""
        return False

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights that this module does not already hold (it may be the trainer's own)."""
        load_module(self.module, weights)

    def make_fast_copies(self) -> None:
        """Do nothing: the module's own layers compute."""

    def drop_fast_copies(self) -> None: ...

    def let_go(self) -> None: ...


def _last_dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


ATTENTION = "posttrain"


def _attention(module: torch.nn.Module, query, key, value, attention_mask, scaling=None, **kwargs: Any):
    paged, layout = active_step(), active_layout()
    changes, factor = ScoreChanges(kwargs.get("softcap"), kwargs.get("s_aux")), scaling
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if paged is None and layout is None:
        if not changes:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=factor, **kwargs)
        out_RHQD = changed_attention(query, key, value, attention_mask, scale=scaling, changes=changes)
        return out_RHQD.transpose(1, 2).contiguous(), None
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise NotImplementedError("attention with masks or biases of its own does not take packed rows")
    window = kwargs.get("sliding_window")
    (query, key, value), size = _one_size(query, key, value)
    if paged is not None:
        return paged(module, query, key, value, scaling, window, changes)[..., :size], None
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


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)


def configurations(model: torch.nn.Module) -> list[Any]:
    """Return the configurations of the model and of all models inside it."""
    return list({id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values())


def set_attention(model: torch.nn.Module, name: str) -> None:
    """Set the model's attention by its name in transformers; models that choose theirs when created ignore it."""
    for config in configurations(model):
        config._attn_implementation_internal = name
