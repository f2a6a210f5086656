"""Computes scores with a reward model (`scorer_loading.py`).

A decoder's score is read at the last token that is not padding, as transformers does; sequences are packed end to end.
Encoders, and decoders whose attention cannot be packed, run their own forward pass on padded sequences.

Shapes: B sequences, T packed tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from posttrain.kernels.packed_attention import PackedLayout, packed_rows
from posttrain.models.forward import at_places, forward_mode_of, hidden_states, own_logits, without_adapters


def packs_rows(model: torch.nn.Module) -> bool:
    """Whether sequences are packed: a causal decoder with a plain `score` head, proved to give the same scores."""
    return forward_mode_of(model).packed


def head_scores(model: Any, hidden_BE: torch.Tensor) -> torch.Tensor:
    """Return (B,) scores of last hidden states, in float32 or better."""
    return to_float32(without_adapters(model).score(hidden_BE).squeeze(-1))


class ScorePass(torch.nn.Module):
    """Maps token ids to one score per sequence, as one module (see `models/forward.py`)."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, ends_B: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return (B,) `scores` of packed sequences that end at these positions."""

        def head(hidden_NE: torch.Tensor, numbers: Any) -> dict[str, torch.Tensor]:
            return {"scores": head_scores(self.model, hidden_NE).clone()}

        return at_places(self.model, input_ids, position_ids, None, ends_B, head)


class PaddedScorePass(ScorePass):
    """The same for models without packing."""

    def forward(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"scores": own_scores(self.model, rows).clone()}


def to_float32(scores: torch.Tensor) -> torch.Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def without_trailing_padding(ids: Sequence[int], pad_token_id: int | None) -> list[int]:
    # If padding and end-of-text are the same token, a sequence loses its own end too: transformers cannot distinguish
    # them, and what follows does not change a decoder's score.
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_token_id:
        end -= 1
    return list(ids[:end])


@torch.no_grad()
def score_rows(
    model: Any, rows: Sequence[Sequence[int]], *, token_budget: int = 16384, max_rows: int | None = None
) -> torch.Tensor:
    """Return (B,) scores on the CPU; passes hold up to `token_budget` tokens and `max_rows` sequences."""
    assert all(len(row) > 0 for row in rows), "a row without tokens has no score"
    model.eval()
    packed = packs_rows(model)
    pad = without_adapters(model).config.get_text_config().pad_token_id
    kept = [without_trailing_padding(row, pad) if packed else list(row) for row in rows]
    scores_B = torch.zeros(len(rows))
    for chosen in _passes([len(row) for row in kept], packed, token_budget, max_rows):
        part = [kept[row] for row in chosen]
        scores_B[chosen] = (packed_scores(model, part) if packed else own_scores(model, part)).float().cpu()
    return scores_B


def _passes(lengths: list[int], packed: bool, token_budget: int, max_rows: int | None) -> Iterator[list[int]]:
    # Long sequences first; a padded one costs as much as the longest of its pass.
    chosen: list[int] = []
    used = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        cost = lengths[row] if packed or not chosen else lengths[chosen[0]]
        if chosen and (used + cost > token_budget or len(chosen) == max_rows):
            yield chosen
            chosen, used, cost = [], 0, lengths[row]
        chosen.append(row)
        used += cost
    if chosen:
        yield chosen


def packed_scores(model: Any, rows: list[list[int]]) -> torch.Tensor:
    device = model.device
    lengths = [len(row) for row in rows]
    ids_T = torch.tensor([token for row in rows for token in row], device=device)
    position_T = torch.cat([torch.arange(length, device=device) for length in lengths])
    with packed_rows(PackedLayout(lengths, device, position_T=position_T)):
        hidden_TE = hidden_states(model, ids_T[None], position_T[None])[0]
    return head_scores(model, hidden_TE[torch.tensor(lengths, device=device).cumsum(0) - 1])


def own_scores(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return (B,) scores by the model's own forward pass: padded, or one at a time if padding changes them."""
    parts = [rows] if forward_mode_of(model).padded else [[row] for row in rows]
    return torch.cat([padded_scores(model, part) for part in parts])


def padded_scores(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    pad = without_adapters(model).config.get_text_config().pad_token_id
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad or 0)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
    # Without a cache: layers that are recomputed for the gradient would find their own keys in it.
    return to_float32(own_logits(model, ids.to(model.device), mask.to(model.device)).squeeze(-1))
