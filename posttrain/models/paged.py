"""The general way to decode with a paged cache: transformers' own module, with its attention answered from the cache.

Any decoder-only model whose attention goes through transformers' attention interface works, whatever else its layers
do (experts, post-norms, learned positions). `posttrain/models/decoder.py` is the fast way for the most used kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from posttrain.kernels.decode import LayerCache, StepTokens, attention
from posttrain.kernels.whole_step import DecodeRows
from posttrain.models.forward import decoder_of, logits_of

Answer = Callable[..., torch.Tensor]
_active: Answer | None = None


def active_step() -> Answer | None:
    """What answers attention right now, if a paged step is being computed."""
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
    """Hidden states and logits of flat tokens, through the module itself."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def hidden(
        self, step: StepTokens, caches: Callable[[int, int, int], LayerCache], wanted_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Final hidden states of the wanted tokens (all, if None); keys and values of all tokens enter the caches."""

        def answer(layer: Any, query, key, value, scale: float | None, window: int | None) -> torch.Tensor:
            query, key, value = (_last_dense(x[0].transpose(0, 1)) for x in (query, key, value))
            cache = caches(layer.layer_idx, key.shape[1], key.shape[2])
            factor = query.shape[-1] ** -0.5 if scale is None else scale
            out = attention(query, key, value, cache, step, scale=factor, window=window)
            return out.view(1, *query.shape)

        with _answering(answer):
            output = decoder_of(self.module)(
                input_ids=step.ids_T[None], position_ids=step.positions_T.long()[None], use_cache=False
            )
        hidden_TE = output.last_hidden_state[0]
        return hidden_TE if wanted_N is None else hidden_TE[wanted_N]

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return logits_of(self.module, hidden_NE)

    def decode(self, rows: DecodeRows, caches: Callable[[int, int, int], LayerCache]) -> bool:
        """Never: the module is called once per token."""
        return False

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies what does not already live in this module (the trainer's own tensors do)."""
        own = self.module.state_dict()
        for name, tensor in weights:
            if name in own and own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)

    def make_fast_copies(self) -> None:
        """Nothing to prepare: the module's own layers compute."""

    def drop_fast_copies(self) -> None: ...

    def let_go(self) -> None: ...


def _last_dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
