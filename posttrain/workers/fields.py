"""What a rank answers with: its rows' tensors by name."""

from __future__ import annotations

import torch

from posttrain.protocol import DataProto


def batch_of(**tensors: torch.Tensor | None) -> DataProto:
    """A batch of these; a rank without rows has none to give."""
    return DataProto.from_dict(tensors={name: tensor for name, tensor in tensors.items() if tensor is not None})
