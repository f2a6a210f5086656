"""The rows of a pass as tensors: packed end to end, each prompt and each response to it once, or padded.

Shapes: B rows, S width of prompt and response, R response width, T packed tokens, N response tokens, U distinct
pairs of a place and the token that it predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from posttrain.engine.pass_plan import Unit
from posttrain.kernels.cuda import to_device
from posttrain.kernels.packed_attention import PackedLayout
from posttrain.protocol import DataProto


@dataclass
class Rows:
    """Input of one forward pass, and where the response tokens are in it.

    `predict_U` are the (flattened) places whose hidden state predicts a response token, and `label_U` those tokens.
    Tokens that come after the same beginning share one such pair: `source_N` (if any do) is the pair of each token, and
    `slot_N` its place in a (B, R) tensor.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    layout: PackedLayout | None
    predict_U: torch.Tensor
    label_U: torch.Tensor
    source_N: torch.Tensor | None
    slot_N: torch.Tensor
    shape: tuple[int, int]

    def of_tokens(self, values_U: torch.Tensor) -> torch.Tensor:
        """Values of all response tokens, from those of the pairs."""
        return values_U if self.source_N is None else values_U.index_select(0, self.source_N)

    def scatter(self, values_U: torch.Tensor) -> torch.Tensor:
        """(B, R) with the values in the places of their tokens and 0 elsewhere."""
        flat = values_U.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.slot_N,), self.of_tokens(values_U)).view(self.shape)


def padded_rows(data: DataProto, device: torch.device) -> Rows:
    """The rows side by side, each from the left, padded on the right only: there no model's real token sees padding,
    whatever it makes of masks and positions."""
    ids_BS, mask_BS, _, real_BR = _tensors(data)
    rows, width = real_BR.shape
    # Prompts arrive padded on the left: a stable sort by the mask moves the real tokens of each row to its start.
    order_BS = mask_BS.long().argsort(dim=1, descending=True, stable=True)
    length_B = mask_BS.sum(-1)
    longest = int(length_B.max())
    left_BL = ids_BS.gather(1, order_BS[:, :longest])
    kept_BL = torch.arange(longest) < length_B[:, None]
    prompt_B = length_B - real_BR.sum(-1)
    row_N, col_N = real_BR.nonzero(as_tuple=True)
    # The state before a token predicts it, and cumsum counts from 1: hence the 2.
    predict_N = row_N * longest + prompt_B[row_N] + real_BR.long().cumsum(-1)[real_BR] - 2
    labels, slots = ids_BS[:, -width:][real_BR], row_N * width + col_N
    position_BL = torch.arange(longest).expand(rows, -1)
    tensors = (left_BL, position_BL, kept_BL.long(), predict_N, labels, slots)
    ids, positions, mask, places, labels, slots = (to_device(x, device) for x in tensors)
    return Rows(ids, positions, mask, None, places, labels, None, slots, (rows, width))


def packed_units(data: DataProto, units: list[Unit], device: torch.device) -> Rows:
    """The rows packed; the rows of `data` are those of the units, end to end.

    All of it happens on the host, so that nothing waits for a device that still computes the pass before. The last
    token of a response is predicted, but predicts nothing and no other token attends to it: it is not computed. A
    response that another one of its unit begins with is read off that one.
    """
    ids_BS, mask_BS, position_BS, real_BR = _tensors(data)
    rows, width = real_BR.shape
    start = ids_BS.shape[1] - width
    sizes = torch.tensor([len(unit.rows) for unit in units])
    leader_B = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    row_B = torch.arange(rows)
    number_B = row_B - leader_B + 1  # of a response among those that share its prompt
    source_B = leader_B + torch.tensor([source for unit in units for source in unit.sources])
    # Which tokens are computed: a prompt with the first of its responses only, a response unless another one serves
    # it, and no response's last token.
    kept_BS = mask_BS.clone()
    kept_BS[:, :start] &= (number_B == 1)[:, None]
    kept_BS[:, start:] &= (source_B == row_B)[:, None]
    length_B = real_BR.sum(-1)
    answered = (length_B > 0).nonzero().squeeze(1)
    kept_BS[answered, start + length_B[answered] - 1] = False
    # Where each token lies in the pack; of one that is not computed, the place of the last computed one before it.
    place_BS = (kept_BS.flatten().long().cumsum(0) - 1).view_as(ids_BS)
    prompt_end_B = place_BS[leader_B, start - 1]
    # The place that predicts each response token: the prompt's end for the first, else the token before it.
    before_BR = torch.cat([prompt_end_B[:, None], place_BS[source_B, start:-1]], -1)
    row_N, col_N = real_BR.nonzero(as_tuple=True)
    # Responses that share a prompt are one sequence, in which segment 0 is the prompt: a token attends to that and to
    # its own segment. Without sharing every sequence has one row, and attention needs no segments.
    segment_T = None
    if len(units) < rows:
        segment_BS = torch.zeros_like(ids_BS)
        segment_BS[:, start:] = number_B[:, None]
        segment_T = segment_BS[kept_BS]
    lengths = torch.zeros(len(units), dtype=torch.long)
    lengths.index_add_(0, torch.repeat_interleave(torch.arange(len(units)), sizes), kept_BS.sum(-1))
    position_T = position_BS[kept_BS]
    predict_N = before_BR[real_BR]
    # The last layer need only compute the states that are read.
    layout = PackedLayout(
        lengths.tolist(), device, segment_T=segment_T, position_T=position_T, wanted_T=predict_N.unique()
    )
    labels, slots = ids_BS[:, start:][real_BR], row_N * width + col_N
    # Rows read off the same tokens often ask for the same prediction: the vocabulary is computed once for each.
    pairs = (predict_N, labels, None)
    if len(labels) and bool((source_B != row_B).any()):
        pairs = _find_distinct(predict_N, labels)
    tensors = (ids_BS[kept_BS][None], position_T[None], *pairs, slots)
    ids, positions, *rest = (None if x is None else to_device(x, device) for x in tensors)
    return Rows(ids, positions, None, layout, *rest, (rows, width))  # pyright: ignore


def with_a_prediction(rows: Rows) -> Rows:
    """Rows without any response token predict one at their first place, and its output is discarded: so every weight
    has a gradient, as FSDP2 expects when it sums gradients over ranks."""
    if len(rows.predict_U):
        return rows
    first = rows.predict_U.new_zeros(1)
    if rows.layout is not None:
        rows.layout.wanted_T = first
    return replace(rows, predict_U=first, label_U=first, source_N=rows.slot_N)


def dummy_rows(device: torch.device, *, packed: bool) -> Rows:
    """One token and the one after it, for a pass without rows: ranks that share a model make equally many passes."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    if packed:
        layout = PackedLayout([1], device, position_T=zero, wanted_T=zero)
        return Rows(zero[None], zero[None], None, layout, zero, zero, None, zero, (1, 1))
    two = torch.arange(2, device=device)[None]
    return Rows(torch.zeros_like(two), two, torch.ones_like(two), None, zero, zero, None, zero, (1, 1))


def _find_distinct(predict_N: torch.Tensor, label_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distinct pairs of place and label, and which of them each token has."""
    size = label_N.max() + 1
    pair_U, source_N = (predict_N * size + label_N).unique(return_inverse=True)
    return pair_U // size, pair_U % size, source_N


def _tensors(data: DataProto) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids_BS, mask_BS = data.batch["input_ids"].cpu(), data.batch["attention_mask"].cpu().bool()
    position_BS = (mask_BS.long().cumsum(-1) - 1).clamp(min=0)
    return ids_BS, mask_BS, position_BS, mask_BS[:, -data.batch["responses"].shape[1] :]
