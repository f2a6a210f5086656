"""Attention with capped scores and sinks: shared prompts and parts of heads, with gradients, against single rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.kernels.packed_attention import PackedLayout, packed_attention
from posttrain.kernels.scores import ScoreChanges
from posttrain.kernels.train import ends_of_responses
from posttrain.models.attention import attention

HEADS, KEY_HEADS, SIZE, SCALE = 4, 2, 8, 0.5
CHANGES = {"cap": (1.5, False), "sinks": (None, True), "both": (1.5, True)}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def one_row(query_THD, key_TKD, value_TKD, position_T, window: int | None, changes: ScoreChanges) -> torch.Tensor:
    key_THD, value_THD = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key_TKD, value_TKD))
    scores = torch.einsum("qhd,khd->hqk", query_THD, key_THD) * SCALE
    if changes.cap is not None:
        scores = changes.cap * torch.tanh(scores / changes.cap)
    away = position_T[:, None] - position_T
    weights = scores.exp() * ((away >= 0) & (away < (window or len(position_T))))
    lost_H = 0.0 if changes.sinks_H is None else changes.sinks_H.exp()[:, None]
    return torch.einsum("hqk,khd->qhd", weights / (weights.sum(-1) + lost_H)[..., None], value_THD)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", CHANGES)
def test_shared_prompts_give_outputs_and_gradients_of_single_rows(kind, window):
    """A prompt of four tokens with responses of three and five, and a row of six beside them."""
    cap, has_sinks = CHANGES[kind]
    given = [draw(18, heads, SIZE, seed=seed) for seed, heads in enumerate((HEADS, KEY_HEADS, KEY_HEADS))]
    sinks = draw(HEADS, seed=9)
    changes = ScoreChanges(cap, sinks if has_sinks else None)
    position_T = torch.tensor([*range(7), *range(4, 9), *range(6)])
    end_T = torch.from_numpy(ends_of_responses([12, 6], np.array([0] * 4 + [1] * 3 + [2] * 5 + [0] * 6)))
    layout = PackedLayout([12, 6], end_T=end_T, position_T=position_T)
    found = packed_attention(*given, layout, scale=SCALE, sliding_window=window, changes=changes)
    rows = [[*range(7)], [*range(4), *range(7, 12)], [*range(12, 18)]]
    alone = [one_row(*(x[row] for x in given), position_T[row], window, changes) for row in rows]
    expected = torch.cat([alone[0], alone[1][4:], alone[2]])
    torch.testing.assert_close(found, expected)
    wanted = [*given, sinks] if has_sinks else given
    ours, theirs = (torch.autograd.grad(out.square().sum(), wanted) for out in (found, expected))
    torch.testing.assert_close(ours, theirs)
    assert all(grad.abs().max() > 1e-3 for grad in ours)


def test_ranks_that_share_the_heads_have_the_sinks_of_theirs():
    given, sinks = [draw(6, HEADS, SIZE, seed=seed) for seed in range(3)], draw(HEADS, seed=9)
    layout, changes = PackedLayout([6]), ScoreChanges(1.5, sinks)
    whole = packed_attention(*given, layout, scale=SCALE, changes=changes)
    parts = [
        packed_attention(*(x.chunk(2, 1)[rank] for x in given), layout, scale=SCALE, changes=changes.of_heads(rank, 2))
        for rank in range(2)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    ours, theirs = (torch.autograd.grad(out.square().sum(), sinks) for out in (torch.cat(parts, 1), whole))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("change", ["softcap", "s_aux"])
def test_biases_beside_caps_or_sinks_are_rejected_in_padded_rows_too(change):
    query = torch.zeros(1, HEADS, 5, SIZE)
    changed = {"softcap": 2.0, "s_aux": torch.zeros(HEADS)}
    with pytest.raises(NotImplementedError, match="biases"):
        attention(
            torch.nn.Module(), query, query, query, None, position_bias=query[..., :5], **{change: changed[change]}
        )
