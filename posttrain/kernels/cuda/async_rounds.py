"""Decoding that runs ahead of the host: the place of each row in the buffers, and results that are still being copied.

A round is a number of decode steps that the device makes without the host. While it computes one, the host reads the
results of the round before, finishes rows and admits new ones: otherwise the device would wait 5 to 15 ms after each
50 ms of a 0.5B model. Rows that ended in that round stay at their places, idle, until the host has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.kernels.whole_step import DecodeRows, places_of

FREE = -1


@dataclass
class Reassignment:
    """Changes to the buffers before a round, in this order."""

    gone: np.ndarray  # places whose rows are removed
    moved: np.ndarray | None  # places of the remaining rows, if they must move to the front
    joined: np.ndarray  # indices of the new rows
    places: np.ndarray  # and their places


class RowPlaces:
    """The number of the row at each place."""

    def __init__(self, capacity: int) -> None:
        self.numbers = np.full(capacity, FREE, np.int64)

    @property
    def empty(self) -> bool:
        return not (self.numbers != FREE).any()

    def clear(self) -> None:
        self.numbers[:] = FREE

    def assign(self, rows: np.ndarray, size: int) -> Reassignment:
        """Assign exactly these rows to the first `size` places."""
        numbers = self.numbers
        gone = np.flatnonzero((numbers != FREE) & ~np.isin(numbers, rows))
        numbers[gone] = FREE
        stay, moved = np.flatnonzero(numbers != FREE), None
        if len(stay) and stay[-1] >= size:  # the remaining rows fit a smaller graph once they are in front
            moved, staying = stay, numbers[stay]
            self.clear()
            numbers[: len(stay)] = staying
        joined = np.flatnonzero(places_of(rows, numbers) < 0)
        places = np.flatnonzero(numbers[:size] == FREE)[: len(joined)]
        numbers[places] = rows[joined]
        return Reassignment(gone, moved, joined, places)


class PendingResults:
    """The results of a round, being copied to the host: copies are queued after it, and the next round after them."""

    def __init__(
        self, numbers: np.ndarray, results: Sequence[torch.Tensor], begun: torch.cuda.Event | None, steps: int
    ) -> None:
        self.numbers, self.begun, self.steps = numbers.copy(), begun, steps
        self.results = [_copy_to_host(tensor) for tensor in results]
        self.finished = record_event(results[0].device)

    @property
    def step_s(self) -> float:
        """Seconds of the device for each step, once the results are there; 0 where they are not measured."""
        if self.begun is None or self.finished is None:
            return 0.0
        return self.begun.elapsed_time(self.finished) / 1000 / self.steps

    def wait(self) -> list[np.ndarray]:
        if self.finished is not None:
            self.finished.synchronize()
        return [tensor.numpy() for tensor in self.results]

    def give(self, rows: DecodeRows) -> None:
        """Write the results into the arrays of these rows; a row that was not in the round has none."""
        place = places_of(rows.numbers, self.numbers)
        there = place >= 0
        made, ended, last, tokens, log_probs = (array[place] for array in self.wait())
        made = np.where(there, made, 0).astype(np.int64)
        rows.ended[:] = np.where(there, ended, 0)
        rows.last = np.where(there, last, rows.last)
        rows.tokens, rows.log_probs = tokens, log_probs
        first = (rows.counts == 0) & (made > 0)  # their first token came from prefill, and is no new history
        rows.next_history += int(made.sum() - first.sum())
        rows.positions = rows.positions + made.astype(rows.positions.dtype)
        rows.counts = rows.counts + made


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    # An asynchronous copy needs pinned memory; it is complete once the event behind it has passed.
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event after all work that the device has been given so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
