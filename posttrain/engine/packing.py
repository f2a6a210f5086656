"""Rows of a batch packed end to end, and batches cut into micro-batches that fit a token budget.

Shapes: B rows, P prompt width, R response width, T packed tokens, N response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from posttrain.kernels.packed_attention import PackedLayout
from posttrain.protocol import DataProto


def row_lengths(data: DataProto) -> list[int]:
    return data.batch["attention_mask"].sum(-1).tolist()


def plan_micro_batches(lengths: list[int], *, token_budget: int, max_rows: int | None = None) -> list[list[int]]:
    """Row numbers of each forward pass: long rows first, filled up to the budget, at least one row each."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    plan: list[list[int]] = []
    used = 0
    for row in order:
        full = not plan or used + lengths[row] > token_budget or (max_rows is not None and len(plan[-1]) >= max_rows)
        if full:
            plan.append([])
            used = 0
        plan[-1].append(row)
        used += lengths[row]
    return plan


@dataclass
class Rows:
    """Input of one forward pass, and where the response tokens are in it.

    `predict_N` are the (flattened) places whose hidden state predicts a response token, `label_N` those tokens, and
    `slot_N` their places in a (B, R) tensor.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    layout: PackedLayout | None
    predict_N: torch.Tensor
    label_N: torch.Tensor
    slot_N: torch.Tensor
    shape: tuple[int, int]

    def scatter(self, values_N: torch.Tensor) -> torch.Tensor:
        """(B, R) with the values in the places of their tokens and 0 elsewhere."""
        flat = values_N.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.slot_N,), values_N).view(self.shape)


def make_rows(data: DataProto, device: torch.device, *, packed: bool) -> Rows:
    """The forward pass of these rows, packed (no padding is computed) or as the padded batch that it is."""
    batch = data.batch
    ids_BS, mask_BS = batch["input_ids"].to(device), batch["attention_mask"].to(device).bool()
    rows, width = batch["responses"].shape
    start = ids_BS.shape[1] - width
    real_BR = mask_BS[:, start:]
    position_BS = (mask_BS.long().cumsum(-1) - 1).clamp(min=0)
    row_N, col_N = real_BR.nonzero(as_tuple=True)
    label_N, slot_N = ids_BS[:, start:][real_BR], row_N * width + col_N
    if not packed:
        predict_N = row_N * ids_BS.shape[1] + start + col_N - 1
        return Rows(ids_BS, position_BS, mask_BS.long(), None, predict_N, label_N, slot_N, (rows, width))
    packed_place_BS = (mask_BS.flatten().long().cumsum(0) - 1).view_as(ids_BS)
    predict_N = packed_place_BS[:, start:][real_BR] - 1
    layout = PackedLayout(mask_BS.sum(-1).tolist(), device)
    return Rows(
        ids_BS[mask_BS][None], position_BS[mask_BS][None], None, layout, predict_N, label_N, slot_N, (rows, width)
    )
