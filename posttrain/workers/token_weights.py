"""Weights of the tokens of a mini-batch: what turns losses per token into one number, the same for every split of it.

Shapes: B rows, R response width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.algorithms import aggregation_weights, mask_counts
from posttrain.batch.columns import Column, MaskColumn
from posttrain.batch.samples import has_several_rows, sample_of_rows
from posttrain.protocol import DataProto


@dataclass(frozen=True, eq=False)
class WeightColumn(Column):
    """The weights of responses of these lengths, by the counts of the whole mini-batch: made where they are read."""

    response_B: np.ndarray
    width: int
    mode: str
    scale: float | None
    tokens: int
    rows: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.response_B), self.width))

    def value(self) -> torch.Tensor:
        mask = MaskColumn(self.response_B, self.width).value()
        totals: dict[str, Any] = {"total_tokens": self.tokens, "total_rows": self.rows}
        return aggregation_weights(mask, self.mode, loss_scale_factor=self.scale, **totals)


def token_weights(mini: DataProto, mode: str, scale: float) -> tuple[dict[str, Any], dict[str, int]]:
    """(`loss_weights` by this aggregation and `mean_weights` of a mean over tokens, counts of the mini-batch).

    With samples of several rows also `row_count`, the number of rows that have tokens.
    """
    sample_B = torch.from_numpy(sample_of_rows(mini)) if has_several_rows(mini) else None
    mask = mini.batch.column("response_mask")
    if isinstance(mask, MaskColumn) and sample_B is None:
        tokens, rows = int(mask.response_B.sum()), int((mask.response_B > 0).sum())
        made: dict[str, Any] = {
            "loss_weights": WeightColumn(mask.response_B, mask.width, mode, scale, tokens, rows),
            "mean_weights": WeightColumn(mask.response_B, mask.width, "token-mean", None, tokens, rows),
        }
        return made, {"total_tokens": tokens, "total_rows": rows}
    mask_BR = mini.batch["response_mask"]
    made = {
        "loss_weights": aggregation_weights(mask_BR, mode, loss_scale_factor=scale, sample_B=sample_B),
        "mean_weights": aggregation_weights(mask_BR, "token-mean"),
    }
    if sample_B is not None:
        made["row_count"] = mask_counts(mask_BR)[1].expand(len(mini)).clone()
    tokens, samples = mask_counts(mask_BR, sample_B)
    return made, {"total_tokens": int(tokens), "total_rows": int(samples)}
