"""Recurrent states of sequences: a layer that keeps no keys and values has a few tensors of fixed size per sequence.

Shapes: S slots of the store, B sequences of a group, L tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from posttrain.kernels.cuda import to_device

Key = tuple[int, str, int]
"""Names a state: (layer, kind, number among the layer's states of that kind)."""


class StateStore:
    """The states of all layers by slot. A layer's tensors are made when it first writes them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.size = device, 0
        self.tensors: dict[Key, torch.Tensor] = {}

    def read(self, key: Key, slots_B: torch.Tensor) -> torch.Tensor:
        return self.tensors[key].index_select(0, slots_B)

    def write(self, key: Key, slots_B: torch.Tensor, values_B: torch.Tensor) -> None:
        if key not in self.tensors:
            shape = (self.size, *values_B.shape[1:])
            self.tensors[key] = torch.zeros(shape, dtype=values_B.dtype, device=self.device)
        self.tensors[key].index_copy_(0, slots_B, values_B.to(self.tensors[key].dtype))

    def keys_of(self, layer: int) -> list[Key]:
        return [key for key in self.tensors if key[0] == layer]

    def copy(self, source: int, target: int) -> None:
        for tensor in self.tensors.values():
            tensor[target].copy_(tensor[source])

    def grow(self, size: int) -> None:
        for key, old in self.tensors.items():
            self.tensors[key] = torch.zeros(size, *old.shape[1:], dtype=old.dtype, device=old.device)
            self.tensors[key][: self.size] = old
        self.size = size

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass
class RowStates:
    """The slot of each row of a step. A fresh row has no state yet; its slot still holds another sequence's."""

    store: StateStore
    slots_R: np.ndarray
    fresh_R: np.ndarray


@dataclass
class StateGroup:
    """Rows of a step that a recurrent layer computes together: they have equally many tokens, and all or none of them
    have a state already."""

    token_BL: torch.Tensor  # int64: numbers of their tokens
    slots_B: torch.Tensor
    fresh: bool


def state_groups(states: RowStates, runs: list[tuple[int, int]], device: torch.device) -> list[StateGroup]:
    """The rows of a step, each with its [start, end) among the tokens, in groups."""
    rows: dict[tuple[int, bool], list[int]] = {}
    for row, (start, end) in enumerate(runs):
        rows.setdefault((end - start, bool(states.fresh_R[row])), []).append(row)
    groups = []
    for (length, fresh), members in rows.items():
        starts_B = np.asarray([runs[row][0] for row in members], np.int64)
        token_BL = to_device(torch.from_numpy(starts_B[:, None] + np.arange(length)), device)
        slots_B = to_device(torch.from_numpy(states.slots_R[members].astype(np.int64)), device)
        groups.append(StateGroup(token_BL, slots_B, fresh))
    return groups
