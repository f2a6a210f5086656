"""How rows of supervised data become a batch."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, cast

import torch

from verl.utils.tensordict_utils import nested_tensor_from_tensor_list


class DatasetPadMode(StrEnum):
    """Where rows of different lengths are filled up."""

    RIGHT = "right"
    LEFT_RIGHT = "left_right"
    NO_PADDING = "no_padding"


class SFTTensorCollator:
    """A `collate_fn`: rows without padding become nested tensors, others are stacked."""

    def __init__(self, pad_mode: DatasetPadMode = DatasetPadMode.LEFT_RIGHT) -> None:
        self.pad_mode = pad_mode

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        if self.pad_mode == DatasetPadMode.NO_PADDING:
            return self.collate_variable_batch(batch)
        if self.pad_mode in (DatasetPadMode.RIGHT, DatasetPadMode.LEFT_RIGHT):
            from torch.utils.data import default_collate

            return default_collate(batch)
        raise ValueError(f"pad_mode={self.pad_mode}: give one of {', '.join(DatasetPadMode)}")

    def collate_variable_batch(self, batch: list[dict[str, Any]]) -> dict[str, Any]:
        """Tensors of a name as one nested tensor; what is no tensor as a stack of TensorDict's."""
        from tensordict.tensorclass import NonTensorData

        made: dict[str, Any] = {}
        for name in dict.fromkeys(name for row in batch for name in row):
            values: list[Any] = [row.get(name) for row in batch]
            if not isinstance(values[0], torch.Tensor):
                made[name] = torch.stack(cast(list[Any], [NonTensorData(value) for value in values]), dim=0)
            elif values[0].dim() >= 2:
                made[name] = nested_tensor_from_tensor_list(values)
            else:
                made[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        return made
