"""Many decode steps on a CUDA device without the host: one CUDA graph per batch size, replayed step after step.

A graph holds a complete step: embedding, layers, head, sampling, and the end of rows. A round is some replays. The host
is one round behind: it queues the next round before it reads the results of the last (`async_rounds.py`), so that the
device never waits for it. Rows join at free places without touching the others.

Rows lie in buffers at fixed addresses that all graphs share; a graph of n rows uses the first n. A place without a row
counts as ended: it writes nothing. It still reads a block, and that is block 0: the block of its last row may be
missing after the cache has shrunk. Writes to the buffers are queued behind what the device is computing; nothing waits.

Shapes: B rows, N blocks of a row, V vocabulary, S steps of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda import FINE, LEAST_ROWS, MOST_STEPS, MOST_TOKENS, bucket, fused_products, to_device
from posttrain.kernels.cuda.async_rounds import PendingResults, RowPlaces, record_event
from posttrain.kernels.cuda.paged_attention import StepRows, splits_for
from posttrain.kernels.cuda.sampling import CHUNK, _pick, chunk_room, row_totals, sum_chunks
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
        self.totals = room(torch.float32, capacity), room(torch.float32, capacity)

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.__dict__["columns"][name]

    def write(self, places: np.ndarray, rows: DecodeRows, which: np.ndarray) -> None:
        """Put rows `which` at these places. A new row can have nothing but its first token under way."""
        made = rows.under_way[which]
        position, count = rows.positions[which] + made, rows.counts[which] + made
        settings = (rows.limits[which], rows.stops[which], rows.greedy[which], rows.temperatures[which].view(np.int32))
        ints = np.stack([position, rows.gaps[which], count, *settings, np.zeros_like(made), made]).astype(np.int32)
        longs = np.stack([rows.last[which], rows.seeds[which].view(np.int64)])
        index, ints, longs, table = (self._send(array) for array in (places, ints, longs, rows.table[which]))
        self.ints_CB.index_copy_(1, index, ints)
        self.longs_CB.index_copy_(1, index, longs)
        self.table[:, : table.shape[1]].index_copy_(0, index, table)

    def begin(self, places: np.ndarray, numbers: np.ndarray, first: FirstTokens, stop_ids: torch.Tensor) -> None:
        """Give rows that were just written their first tokens, with which they may end."""
        source = first.places(numbers)
        new = np.flatnonzero(source >= 0)
        index, source = self._send(places[new]), self._send(source[new])
        tokens = first.tokens[source]
        self.token[index] = tokens
        self.tokens[index, 0], self.log_probs[index, 0] = tokens.int(), first.log_probs[source]
        stopped = (stop_ids[self.stops[index].long()] == tokens[:, None]).any(1).int()
        full = (self.count[index] >= self.limit[index]).int()
        self.ended[index] = torch.maximum(stopped, 2 * full * (1 - stopped))

    def move(self, places: np.ndarray) -> None:
        """Move the rows at these places to the front, in this order; all others are gone."""
        index, count = self._send(places), len(places)
        for matrix in (self.ints_CB, self.longs_CB):
            matrix[:, :count] = matrix[:, index]
        self.table[:count] = self.table[index]
        self.empty(count)

    def end(self, places: np.ndarray) -> None:
        """Remove the rows at these places."""
        index = self._send(places)
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

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)


Replay = Callable[[], None]


@triton.jit(do_not_specialize=["rows", "width"])
def _begin(
    POSITION, PROMPT, ENDED, TABLE, SEEN_POSITION, SLOT, LENGTH, SEEN_PROMPT, rows, width,
    BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    # The position and slot of each row's newest token, and how many places it reads. Ended rows write nothing (slot -1)
    # and get position 0: the rotation table may have become too short for their own.
    row = tl.program_id(0) * N + tl.arange(0, N)
    real = row < rows
    live = real & (tl.load(ENDED + row, mask=real, other=1) == 0)
    position = tl.load(POSITION + row, mask=live, other=0)
    prompt = tl.load(PROMPT + row, mask=live, other=1)
    full = (prompt + BLOCK - 1) // BLOCK * BLOCK
    place = full + position - prompt
    block = tl.load(TABLE + row * width + place // BLOCK, mask=live, other=0).to(tl.int64)
    tl.store(SEEN_POSITION + row, position, mask=real)
    tl.store(SLOT + row, tl.where(live, block * BLOCK + place % BLOCK, -1), mask=real)
    tl.store(LENGTH + row, tl.where(live, place + 1, 1), mask=real)
    tl.store(SEEN_PROMPT + row, prompt, mask=real)


class StepModel(Protocol):
    """What a captured step needs of the model. `exact`: log-probs have the bits that training gives them."""

    exact: bool

    def next_hidden(self, tokens_B: torch.Tensor, rows: StepRows) -> torch.Tensor:
        """Final hidden states of each row's newest token, which enters the cache."""
        ...

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor: ...

    def head_weight(self) -> torch.Tensor | None:
        """The head's weight, if its product with the hidden states is all there is to logits."""
        ...


class GraphedSteps:
    """Runs steps of a model and samples, as graphs; `block` is the number of tokens in a block."""

    def __init__(
        self,
        model: StepModel,
        *,
        vocabulary: int,
        key_heads: int,
        block: int,
        device: torch.device,
    ) -> None:
        self.model, self.vocabulary, self.key_heads = model, vocabulary, key_heads
        self.block, self.device = block, device
        self.replays: dict[tuple[int, int, bool], Replay] = {}
        self.memory = None
        self.stop_ids, self.stop_sets = torch.full((1, 1), -1, dtype=torch.int32, device=device), []
        self.rows = RowBuffers(0, 0, vocabulary, device)
        self.order, self.pending = RowPlaces(0), None
        self.step_s = 0.0  # of the device, in the newest round that was read
        self.addresses: list[int] | None = None

    def forget(self) -> None:
        """Drop all graphs, because tensors that they use have moved. The rows stay."""
        if self.pending is not None:
            self.pending.wait()
        self.replays, self.memory = {}, None

    def decode(self, rows: DecodeRows, addresses: list[int]) -> None:
        """Start `rows.steps` more steps of the rows, and return the results of the round before. `addresses` are
        those of all that a step reads and writes: steps are captured again if one of them has changed."""
        if addresses != self.addresses:
            self.forget()
            self.addresses = addresses
        rows.steps = min(rows.steps, MOST_STEPS)
        self._make_room(len(rows.last), rows.table.shape[1])
        self._load_stops(rows.stop_sets)
        if self.order.empty:  # all rows are written again, so the host must know their newest state
            self._give(rows)
        before, self.pending = self.pending, None
        under_way = self._launch(rows)
        if before is not None:
            before.give(rows)
            self.step_s = before.step_s
        if self.pending is not None:  # begins now, as the round before has just ended
            rows.busy_s = rows.steps * self.step_s
        rows.under_way = under_way

    def collect(self, rows: DecodeRows) -> None:
        """Return all results and start nothing; afterwards nothing is under way, and rows may be changed."""
        self._give(rows)
        self.order.clear()
        self.rows.empty()

    def _give(self, rows: DecodeRows) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.give(rows)
        rows.under_way = rows.only_begun()

    def _launch(self, rows: DecodeRows) -> np.ndarray:
        # Queues a round of the rows that have not ended. Returns how many tokens each may get in it.
        which = np.flatnonzero(rows.ended == 0)
        coming = np.zeros_like(rows.under_way)
        if not len(which):
            return coming
        size = bucket(len(which))
        self.rows.made.zero_()
        self._place_rows(rows, which, size)
        splits = splits_for(size, self.key_heads, rows.longest)
        kind = size, splits, rows.together
        replay = self.replays.get(kind) or self._capture(*kind)
        begun = record_event(self.device)
        for _ in range(rows.steps):
            replay()
        results = self.rows.results(size, rows.steps)
        self.pending = PendingResults(self.order.numbers[:size], results, begun, rows.steps)
        left = rows.limits - rows.counts - rows.under_way
        coming[which] = (np.clip(left, 0, rows.steps) + rows.only_begun())[which]
        return coming

    def _place_rows(self, rows: DecodeRows, which: np.ndarray, size: int) -> None:
        todo = self.order.assign(rows.numbers[which], size)
        if len(todo.gone):
            self.rows.end(todo.gone)
        if todo.moved is not None:
            self.rows.move(todo.moved)
        if len(todo.joined):
            joined = which[todo.joined]
            self.rows.write(todo.places, rows, joined)
            if rows.first is not None:
                self.rows.begin(todo.places, rows.numbers[joined], rows.first, self.stop_ids)

    def _make_room(self, rows: int, width: int) -> None:
        capacity, held = max(bucket(rows), self.rows.capacity), self.rows.width
        if capacity > self.rows.capacity or width > held:
            self.forget()
            self.rows = RowBuffers(capacity, max(triton.next_power_of_2(width), held), self.vocabulary, self.device)
            self.order = RowPlaces(capacity)

    def _load_stops(self, stop_sets: Sequence[Sequence[int]]) -> None:
        # The table only grows: graphs hold its address, and a new one means capturing them again.
        if self.stop_sets == stop_sets:
            return
        self.stop_sets = list(stop_sets)
        shape = (max(8, len(stop_sets)), triton.next_power_of_2(max(1, *map(len, stop_sets), 1)))
        if any(size > held for size, held in zip(shape, self.stop_ids.shape, strict=True)):
            self.forget()
            self.stop_ids = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        table = np.full(tuple(self.stop_ids.shape), -1, np.int32)
        for number, ids in enumerate(stop_sets):
            table[number, : len(ids)] = ids
        self.stop_ids.copy_(to_device(torch.from_numpy(table), self.device))

    def _capture(self, size: int, splits: int, together: bool) -> Replay:
        # Capturing runs the step once before. All rows are marked as ended meanwhile, so that it writes nothing.
        if self.device.type != "cuda":  # Triton's interpreter has no graphs: the step itself is run each time
            self.replays[size, splits, together] = lambda: self._whole_step(size, splits, together)
            return self.replays[size, splits, together]
        ended = self.rows.ended[:size].clone()
        self.rows.ended[:size].fill_(1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._whole_step(size, splits, together)  # a warm-up: kernels are compiled now and not during capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self.memory is None:
            self.memory = torch.cuda.graph_pool_handle()  # all graphs share one pool: only one runs at a time
        with torch.cuda.graph(graph, pool=self.memory):
            self._whole_step(size, splits, together)
        self.rows.ended[:size].copy_(ended)
        self.replays[size, splits, together] = graph.replay
        return graph.replay

    def _whole_step(self, size: int, splits: int, together: bool) -> None:
        rows, table = self.rows, self.rows.table[:size]
        _begin[(triton.cdiv(size, 128),)](
            rows.position, rows.prompt, rows.ended, rows.table, *rows.seen, size, rows.width, self.block, 128,
            num_warps=4,
        )  # fmt: skip
        seen = [column[:size] for column in rows.seen]
        nowhere = torch.full_like(seen[1], -1) if together else None
        hidden_BE = self.model.next_hidden(rows.token[:size], StepRows(*seen, table, splits, nowhere))
        weight_VE, logits_BV = self.model.head_weight(), None
        if fused_products.takes(hidden_BE, weight_VE, LEAST_ROWS):
            chunk, width = FINE, hidden_BE.shape[1]
            fused_products.head_sums(hidden_BE, weight_VE, rows.temperature, rows.chunks)
        else:
            logits_BV, chunk, width = self.model.logits(hidden_BE), CHUNK, 0
            sum_chunks(logits_BV, rows.temperature, rows.chunks)
        chunks, stop_width = triton.cdiv(self.vocabulary, chunk), self.stop_ids.shape[1]
        if self.model.exact:
            row_totals(rows.chunks, size, chunks, rows.totals)
        _pick[(size,)](
            logits_BV, hidden_BE, weight_VE, None, rows.temperature, rows.greedy, rows.seed, rows.count, *rows.chunks,
            rows.token, None, rows.ended, rows.made, rows.position, rows.limit, rows.stops, self.stop_ids, rows.tokens,
            rows.log_probs, self.vocabulary, chunks, stop_width, MOST_TOKENS, width, chunk,
            triton.next_power_of_2(chunks), triton.next_power_of_2(stop_width), False, True, *rows.totals,
            self.model.exact, num_warps=8 if width else 4,
        )  # fmt: skip
