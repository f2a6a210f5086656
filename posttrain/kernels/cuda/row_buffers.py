"""The rows of captured decoding, in buffers at fixed addresses that all graphs share; one of n rows uses the first n.

A place without a row counts as ended: it writes nothing. It still reads a block, and that is block 0: the block of its
last row may be missing after the cache has shrunk. Everything here is queued behind what the device is computing;
nothing waits.
"""

from __future__ import annotations

import numpy as np
import torch

from posttrain.kernels.cuda import FINE, MOST_TOKENS, to_device
from posttrain.kernels.cuda.sampling import chunk_room
from posttrain.kernels.whole_step import DecodeRows, FirstTokens

_INTS = ("position", "prompt", "count", "limit", "stops", "greedy", "temperature", "ended", "made")
_LONGS = ("token", "seed")
_SEEN = (torch.int32, torch.int64, torch.int32, torch.int32)  # position, slot, length, prompt of `StepRows`


class RowBuffers:
    """`capacity` places for rows of up to `width` blocks: the state of each row, and its results of a round."""

    def __init__(self, capacity: int, width: int, vocabulary: int, device: torch.device) -> None:
        self.capacity, self.width, self.device = capacity, width, device

        def room(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.ints_CB, self.longs_CB = room(torch.int32, len(_INTS), capacity), room(torch.int64, len(_LONGS), capacity)
        self.columns = dict(zip((*_INTS, *_LONGS), (*self.ints_CB, *self.longs_CB), strict=True))
        self.columns["temperature"] = self.columns["temperature"].view(torch.float32)
        self.columns["temperature"].fill_(1.0)  # logits of unused places are divided by it too
        self.columns["ended"].fill_(1)
        self.table = room(torch.int32, capacity, width)
        self.seen = tuple(room(kind, capacity) for kind in _SEEN)  # what a step reads of the rows
        self.tokens, self.log_probs = (room(kind, capacity, MOST_TOKENS) for kind in (torch.int32, torch.float32))
        self.chunks = chunk_room(capacity, vocabulary, FINE, device)  # enough for larger chunks too

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.__dict__["columns"][name]

    def write(self, places: np.ndarray, rows: DecodeRows, which: np.ndarray) -> None:
        """Put rows `which` at these places. A new row can have nothing but its first token under way."""
        made = rows.under_way[which]
        position, count = rows.positions[which] + made, rows.counts[which] + made
        settings = (rows.limits[which], rows.stops[which], rows.greedy[which], rows.temperatures[which].view(np.int32))
        ints = np.stack([position, rows.gaps[which], count, *settings, np.zeros_like(made), made]).astype(np.int32)
        longs = np.stack([rows.last[which], rows.seeds[which].view(np.int64)])
        index, ints, longs, table = (self._sent(array) for array in (places, ints, longs, rows.table[which]))
        self.ints_CB.index_copy_(1, index, ints)
        self.longs_CB.index_copy_(1, index, longs)
        self.table[:, : table.shape[1]].index_copy_(0, index, table)

    def begin(self, places: np.ndarray, numbers: np.ndarray, first: FirstTokens, stop_ids: torch.Tensor) -> None:
        """Give rows that were just written their first tokens, with which they may end."""
        source = first.places(numbers)
        new = np.flatnonzero(source >= 0)
        index, source = self._sent(places[new]), self._sent(source[new])
        tokens = first.tokens[source]
        self.token[index] = tokens
        self.tokens[index, 0], self.log_probs[index, 0] = tokens.int(), first.log_probs[source]
        stopped = (stop_ids[self.stops[index].long()] == tokens[:, None]).any(1).int()
        full = (self.count[index] >= self.limit[index]).int()
        self.ended[index] = torch.maximum(stopped, 2 * full * (1 - stopped))

    def move(self, places: np.ndarray) -> None:
        """Move the rows at these places to the front, in this order; all others are gone."""
        index, count = self._sent(places), len(places)
        for matrix in (self.ints_CB, self.longs_CB):
            matrix[:, :count] = matrix[:, index]
        self.table[:count] = self.table[index]
        self.empty(count)

    def end(self, places: np.ndarray) -> None:
        """Remove the rows at these places."""
        index = self._sent(places)
        self.ended.index_fill_(0, index, 1)
        self.table.index_fill_(0, index, 0)

    def empty(self, first: int = 0) -> None:
        """Remove the rows at all places from this one on."""
        self.ended[first:].fill_(1)
        self.table[first:].zero_()

    def results(self, size: int, steps: int) -> tuple[torch.Tensor, ...]:
        """(made, ended, newest token, tokens, log-probs) of the first `size` places after a round of so many steps."""
        columns = (self.made[:size], self.ended[:size], self.token[:size])
        return (*columns, self.tokens[:size, : steps + 1], self.log_probs[:size, : steps + 1])

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)
