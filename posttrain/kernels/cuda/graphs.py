"""Many steps of decoding on a CUDA device without the host: one graph per number of rows, replayed step after step.

A graph holds a whole step: embedding, layers, head, sampling, and the ends of rows. What a row is (its newest token,
position, blocks, seed, limits) lies in buffers at fixed addresses that all graphs share; a graph of n rows works on the
first n. The host writes the rows once, replays, and reads what they made. Rows that have ended stand still.

Shapes: B rows, N blocks of a row, V vocabulary, S steps of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda import bucket
from posttrain.kernels.cuda.attention import decode_attention, splits_for
from posttrain.kernels.cuda.sampling import CHUNK, _chunk_sums, _pick, chunk_room
from posttrain.kernels.whole_step import DecodeRows

MOST_STEPS = 256  # of one call: some seconds with a large model, in which nobody hears of progress


@dataclass
class StepRows:
    """What the layers of one step read: (B,) each, `table` (B, N); views into the buffers."""

    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    prompts: torch.Tensor
    table: torch.Tensor
    splits: int

    def attend(self, query_BHD: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], scale: float, window):
        return decode_attention(
            query_BHD, cache, self.table, self.lengths, self.prompts, scale=scale, window=window, splits=self.splits
        )


@triton.jit
def _begin(
    POSITION, PROMPT, ENDED, TABLE, SLOT, LENGTH, SEEN_PROMPT, rows, width, BLOCK: tl.constexpr, N: tl.constexpr
):
    """Where each row's newest token goes and how many places it reads; rows that have ended write nothing."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    real = row < rows
    live = real & (tl.load(ENDED + row, mask=real, other=1) == 0)
    position = tl.load(POSITION + row, mask=live, other=0)
    prompt = tl.load(PROMPT + row, mask=live, other=1)
    full = (prompt + BLOCK - 1) // BLOCK * BLOCK
    place = full + position - prompt
    block = tl.load(TABLE + row * width + place // BLOCK, mask=live, other=0).to(tl.int64)
    tl.store(SLOT + row, tl.where(live, block * BLOCK + place % BLOCK, -1), mask=real)
    tl.store(LENGTH + row, tl.where(live, place + 1, 1), mask=real)
    tl.store(SEEN_PROMPT + row, prompt, mask=real)


class GraphedSteps:
    """Runs `step(tokens, rows) -> logits` and samples, as graphs; `block` is the number of tokens in a block."""

    def __init__(
        self,
        step: Callable[[torch.Tensor, StepRows], torch.Tensor],
        *,
        vocabulary: int,
        key_heads: int,
        block: int,
        device: torch.device,
    ) -> None:
        self.step, self.vocabulary, self.key_heads, self.block, self.device = step, vocabulary, key_heads, block, device
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.memory = None
        self.capacity = self.width = 0
        self.stop_ids = torch.full((1, 1), -1, dtype=torch.int32, device=device)

    def forget(self) -> None:
        """Tensors that the graphs use are gone, or have moved."""
        self.graphs, self.memory = {}, None

    def _make_room(self, rows: int, width: int, stop_sets: Sequence[Sequence[int]]) -> None:
        stop_width = max(1, *(len(ids) for ids in stop_sets)) if stop_sets else 1
        if len(stop_sets) > len(self.stop_ids) or stop_width > self.stop_ids.shape[1]:
            shape = (max(8, len(stop_sets)), triton.next_power_of_2(stop_width))
            self.stop_ids = torch.full(shape, -1, dtype=torch.int32, device=self.device)
            self.forget()
        table = np.full(tuple(self.stop_ids.shape), -1, np.int32)
        for number, ids in enumerate(stop_sets):
            table[number, : len(ids)] = ids
        self.stop_ids.copy_(torch.from_numpy(table))
        if rows <= self.capacity and width <= self.width:
            return
        self.forget()
        self.capacity, self.width = max(bucket(rows), self.capacity), max(triton.next_power_of_2(width), self.width)

        def room(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(self.capacity, *shape, dtype=kind, device=self.device)

        self.token, self.seed = room(torch.int64), room(torch.int64)
        self.ints = {
            name: room(torch.int32) for name in ("position", "prompt", "count", "limit", "stops", "greedy", "made")
        }
        self.ended = room(torch.int32)
        self.temperature = room(torch.float32)
        self.table = room(torch.int32, self.width)
        self.slot, self.length, self.seen_prompt = room(torch.int64), room(torch.int32), room(torch.int32)
        self.tokens, self.log_probs = room(torch.int32, MOST_STEPS), room(torch.float32, MOST_STEPS)
        self.room = chunk_room(self.capacity, self.vocabulary, self.device)

    def decode(self, rows: DecodeRows) -> None:
        """Let the rows decode for `rows.steps` steps; what they made is written into the same arrays."""
        count = len(rows.last)
        steps = rows.steps = min(rows.steps, MOST_STEPS)
        self._make_room(count, rows.table.shape[1], rows.stop_sets)
        size = bucket(count)
        splits = splits_for(size, self.key_heads, rows.longest)
        graph = self.graphs.get((size, splits)) or self._capture(size, splits)
        self._write(rows, count, size)
        for _ in range(steps):
            graph.replay()
        made = self.ints["made"][:count].cpu().numpy().astype(np.int64)
        rows.ended[:] = self.ended[:count].cpu().numpy().astype(np.uint8)
        rows.tokens = self.tokens[:count, :steps].cpu().numpy().astype(np.int64)
        rows.log_probs = self.log_probs[:count, :steps].cpu().numpy()
        rows.last = self.token[:count].cpu().numpy()
        rows.positions = rows.positions + made.astype(rows.positions.dtype)
        rows.counts = rows.counts + made
        rows.next_history += int(made.sum())

    def _write(self, rows: DecodeRows, count: int, size: int) -> None:
        prompts = rows.positions - rows.counts + 1  # the newest token is not in the cache yet
        columns = {
            "position": rows.positions, "prompt": prompts, "count": rows.counts, "limit": rows.limits,
            "stops": rows.stops, "greedy": rows.greedy,
        }  # fmt: skip
        for name, values in columns.items():
            self.ints[name][:count].copy_(torch.from_numpy(values.astype(np.int32)))
        self.token[:count].copy_(torch.from_numpy(rows.last))
        self.seed[:count].copy_(torch.from_numpy(rows.seeds.view(np.int64)))
        self.temperature[:count].copy_(torch.from_numpy(rows.temperatures))
        self.table[:count, : rows.table.shape[1]].copy_(torch.from_numpy(np.ascontiguousarray(rows.table)))
        self.ints["made"][:count].zero_()
        self.ended[:count].zero_()
        self.ended[count:size].fill_(1)

    def _capture(self, size: int, splits: int) -> torch.cuda.CUDAGraph:
        """A graph of one step of `size` rows. All of them have ended while it is made, so that it writes nothing."""
        self.ended[:size].fill_(1)
        self.temperature[:size].fill_(1.0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._whole_step(size, splits)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self.memory is None:
            self.memory = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.memory):
            self._whole_step(size, splits)
        self.graphs[size, splits] = graph
        return graph

    def _whole_step(self, size: int, splits: int) -> None:
        ints = {name: column[:size] for name, column in self.ints.items()}
        _begin[(triton.cdiv(size, 128),)](
            ints["position"], ints["prompt"], self.ended, self.table, self.slot, self.length, self.seen_prompt, size,
            self.width, self.block, 128, num_warps=4,
        )  # fmt: skip
        rows = StepRows(
            ints["position"], self.slot[:size], self.length[:size], self.seen_prompt[:size], self.table[:size], splits
        )
        logits_BV = self.step(self.token[:size], rows)
        chunks = self.room[0].shape[1]
        _chunk_sums[(size, chunks)](
            logits_BV, None, self.temperature, *self.room, self.vocabulary, chunks, CHUNK, False, num_warps=4
        )
        stop_width = self.stop_ids.shape[1]
        _pick[(size,)](
            logits_BV, None, self.temperature, ints["greedy"], self.seed, ints["count"], *self.room, self.token, None,
            self.ended, ints["made"], ints["position"], ints["limit"], ints["stops"], self.stop_ids, self.tokens,
            self.log_probs, self.vocabulary, chunks, stop_width, MOST_STEPS,
            CHUNK, triton.next_power_of_2(chunks), triton.next_power_of_2(stop_width), False, True, num_warps=4,
        )  # fmt: skip
