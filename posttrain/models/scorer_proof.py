"""Proves, when a reward model has been loaded, that packed or padded sequences get the scores that each gets alone.

It works as in `proof.py`, on the same two sequences. An untrained head shows nothing, so the hidden states that it
reads are compared too.
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain.kernels.packed_attention import PackedLayout
from posttrain.models.attention import ATTENTION, set_attention
from posttrain.models.forward import ForwardMode, hidden_states
from posttrain.models.proof import (
    PACKABLE,
    Compute,
    Plain,
    ProofError,
    checked_hidden,
    compute_plain,
    disagreement,
    layer_kinds,
)
from posttrain.models.scorer import packed_scores, padded_scores

# Scores (2,) of the sequences, and the hidden states (2, E) at their ends.
Numbers = tuple[torch.Tensor, torch.Tensor]


def plain_scores(model: Any, what: str) -> Plain:
    """Return scores as transformers computes them, one sequence at a time; `what` names the model in errors."""
    return compute_plain(model, what, _alone)


@torch.no_grad()
def find_scorer_mode(model: Any, plain: Plain, what: str) -> ForwardMode:
    """Choose packing for a decoder with a linear head if it agrees, else padding, else one sequence at a time."""

    def holds(compute: Compute) -> bool:
        return disagreement(model, plain, compute, _near) is None

    own = model.config._attn_implementation
    if layer_kinds(model) <= PACKABLE and type(getattr(model, "score", None)) is torch.nn.Linear:
        set_attention(model, ATTENTION)
        if holds(_packed) and holds(_padded):
            return ForwardMode(packed=True, padded=True)
        set_attention(model, own)
    if not holds(_alone):
        raise ProofError(f"{what}: the model does not give a row the same score twice")
    if holds(_padded):
        return ForwardMode(padded=True)
    kind = model.config.model_type
    return ForwardMode(note=f"{kind}: a row's score depends on the padding beside it; rows are scored one at a time.")


def _near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    # Relative to the size of what is compared, because scores have no natural scale.
    share = 1e-3 if theirs.dtype in (torch.float32, torch.float64) else 0.1
    ours, theirs = ours.double(), theirs.double()
    return bool((ours - theirs).norm() <= share * theirs.norm())


def _alone(model: Any, rows: list[list[int]]) -> Numbers:
    ids = [torch.tensor([row], device=model.device) for row in rows]
    ends = torch.stack([hidden_states(model, row)[0, -1] for row in ids])
    return torch.cat([padded_scores(model, [row]) for row in rows]).to(ends.dtype), ends


def _padded(model: Any, rows: list[list[int]]) -> tuple[torch.Tensor, ...]:
    return (padded_scores(model, rows).to(model.dtype),)


def _packed(model: Any, rows: list[list[int]]) -> Numbers:
    lengths = [len(row) for row in rows]
    ids_T, position_T = (
        torch.tensor([x for row in rows for x in f(row)], device=model.device) for f in (list, _places)
    )
    hidden_TE = checked_hidden(model, ids_T, position_T, PackedLayout(lengths, model.device, position_T=position_T))
    return packed_scores(model, rows).to(hidden_TE.dtype), hidden_TE[torch.tensor(lengths).cumsum(0) - 1]


def _places(row: list[int]) -> range:
    return range(len(row))
