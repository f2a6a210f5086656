"""Copies of tensors in host memory, taken while training waits: as quickly as the bus and the memory allow."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
_STAGING = 2**27


class HostCopies:
    """Takes copies of tensors, one set at a time: the next set may be taken when the last one was written.

    Copies of a GPU's tensors stay allocated for the next time: touching tens of GiB of new pages takes longer than
    copying into them. On a CPU they are freed, since the memory is what training itself runs in.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._staging: list[torch.Tensor] = []

    def take(self, tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """By the same keys, tensors in host memory with the values of now."""
        found, from_gpu = {}, []
        for key, tensor in tensors.items():
            if tensor.device.type != "cuda" or not tensor.is_contiguous():
                found[key] = tensor.detach().to("cpu", copy=True)
                continue
            kept = self._kept.get(key)
            if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                # Not pinned: torch rounds pinned memory up to powers of two, and locking its pages takes seconds.
                kept = self._kept[key] = torch.empty_like(tensor, device="cpu")
            found[key] = kept
            from_gpu.append((tensor.detach(), kept))
        if from_gpu:
            self._copy(from_gpu)
        return found

    def held_bytes(self) -> int:
        """Memory that the next set needs no more of."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Through two pinned pieces of memory: one is filled from the device while all cores empty the other."""
        if not self._staging:
            self._staging = [torch.empty(_STAGING, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        device = pairs[0][0].device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        waiting: list[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]] = []
        turn = 0
        for source, target in pairs:
            for piece, place in _pieces(source, target):
                staged = self._staging[turn % 2][: piece.numel()]
                turn += 1
                if len(waiting) == 2:
                    _empty(waiting.pop(0))
                with torch.cuda.stream(stream):
                    staged.copy_(piece, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record(stream)
                waiting.append((event, staged, place))
        for one in waiting:
            _empty(one)


def _empty(piece: tuple[torch.cuda.Event, torch.Tensor, torch.Tensor]) -> None:
    event, staged, place = piece
    event.synchronize()
    place.copy_(staged)


def _pieces(source: torch.Tensor, target: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Both as bytes, in pieces of the staging memory's size."""
    ours, theirs = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
    return list(zip(ours.split(_STAGING), theirs.split(_STAGING), strict=True))
