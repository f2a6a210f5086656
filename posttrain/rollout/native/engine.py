"""The native engine: continuous batching with a paged cache, over weights that the trainer already holds.

A step lets in what there is room for, computes one flat batch (the newest token of every running row, and pieces of new
prompts up to a budget), and samples one token of every row whose logits are there. Equal prompts are computed once.
While nobody can be let in, rows go on for several tokens in one step, where the decoder can do that; rows that have
made the same tokens so far are computed as one.

Shapes: T tokens of a step, N whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from posttrain.kernels import cuda
from posttrain.kernels.decode import BLOCK, LayerCache, StepTokens
from posttrain.kernels.first_tokens import FirstTokens
from posttrain.kernels.whole_step import DecodeRows
from posttrain.rollout.base import Output, Request, RolloutEngine, Stage
from posttrain.rollout.native.batch import step_tokens, with_rows
from posttrain.rollout.native.pool import Pool, blocks_for
from posttrain.rollout.native.prompts import Left, Piece, Prompt, Queue
from posttrain.rollout.native.slots import Slots
from posttrain.rollout.sampling import log_probs_of, sample, sample_plain, sample_unread, uniforms

_COLUMNS_OF_ROWS = {
    "last": "last", "positions": "length", "counts": "count", "limits": "limit", "seeds": "seed",
    "temperatures": "temperature", "greedy": "greedy", "stops": "stops", "histories": "history", "numbers": "number",
    "under_way": "under_way",
}  # fmt: skip
MANY, MANY_TOKENS = 16, 512  # steps of a row, or tokens of all rows, for which it pays to lay weights out anew
FEW = 512  # prompt tokens for which weights laid out for decoding are as good as any


class Decoder(Protocol):
    """What the engine needs of a model."""

    def hidden(
        self, step: StepTokens, caches: Callable[[int, int, int], LayerCache], wanted_N: torch.Tensor | None = None
    ) -> torch.Tensor: ...
    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor: ...
    def decode(self, rows: DecodeRows, caches: Callable[[int, int, int], LayerCache]) -> bool: ...
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...
    def make_fast_copies(self) -> None: ...
    def drop_fast_copies(self) -> None: ...


class NativeEngine(RolloutEngine):
    """Decodes with `decoder`; `decode` turns ids into text for stop strings."""

    def __init__(
        self,
        decoder: Decoder,
        pool: Pool,
        *,
        max_num_seqs: int = 1024,
        max_num_batched_tokens: int = 8192,
        tokens_per_step: int = 1,
        tokens_unseen: int | None = None,
        decode: Callable[[list[int]], str] | None = None,
        shares_weights: bool = True,
    ) -> None:
        """`tokens_unseen`: where a row that ends within a step of many tokens stands still until the step is over, the
        length of a step in which rows may end."""
        self.decoder, self.pool, self.decode, self.shares_weights = decoder, pool, decode, shares_weights
        self.tokens_unseen = tokens_unseen
        self.tokens_per_step, self.steady = tokens_per_step, False
        self.copies_pay = False  # whether requests are long enough for weights to be laid out anew
        self.budget, self.slots, self.queue = max_num_batched_tokens, Slots(max_num_seqs), Queue(pool)
        self.prompt_tokens = self.response_tokens = 0  # computed since the engine was made
        self.late: dict[int, str] = {}  # rows that were found to have ended between steps, and why
        self.first: list[FirstTokens] = []  # of rows that the decoder does not know yet

    # -- requests -------------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> None:
        if request.sampling.stop and self.decode is None:
            raise ValueError("stop strings need an engine that was given `decode`")
        if request.sampling.max_tokens < 1 or not request.prompt_ids:
            raise ValueError(f"request {request.id}: needs a prompt and room for at least one token")
        self.check_awake("cache")
        self.queue.add(request)
        self.steady = False

    def has_work(self) -> bool:
        return bool(self.queue.prompts or len(self.slots.active))

    def abort(self, ids: Iterable[Hashable]) -> list[Output]:
        wanted, slots, self.steady = set(ids), self.slots, False
        gone = [Output(request.id, [], [], "abort", []) for request in self.queue.remove(wanted)]
        leaving = [slot for slot in slots.active.tolist() if slots.requests[slot].id in wanted]  # pyright: ignore
        return gone + self._finish({slot: self.late.pop(slot, "abort") for slot in leaving})

    def release(self, ids: Iterable[Hashable]) -> None:
        self.queue.release(ids)

    def running_tokens(self) -> int:
        return int(self.slots.count[self.slots.active].sum())

    # -- a step ---------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self) -> list[Output]:
        decoding = self.slots.active
        if not self._plain(decoding):
            self._catch_up()
        if self.late:
            ended, self.late = self.late, {}
            return self._finish(ended)
        if self._alone(decoding) and (ended := self._go_on(decoding)) is not None:
            return self._finish(ended)
        self.queue.open(self.slots.room)
        # Where many tokens go in one captured step, the running rows wait for it rather than take one here.
        moved = decoding[:0] if self.tokens_unseen is not None and self._plain(decoding) else decoding
        pieces = self.queue.next_pieces(max(self.budget - len(moved), BLOCK))
        if sum(end - start for _, start, end in pieces) <= FEW:
            self._copy_if_long(request for prompt, _, _ in pieces for request in prompt.waiting)
        logits_NV = self._forward(moved, pieces)
        new, prompts = self._start_rows()
        logits_NV, source_B = _sources(logits_NV, len(moved), prompts)
        for prompt in (*prompts, *(prompt for prompt, _, _ in pieces if prompt.ready)):
            if prompt.waiting and prompt.logits_V is None and prompt.place >= 0:
                prompt.logits_V = logits_NV[prompt.place].clone()  # pyright: ignore
            prompt.place = -1
        self.slots.active = np.concatenate([decoding, new])
        slots_B = np.concatenate([moved, new])
        waited = len(moved) < len(decoding) and not self.queue.unfinished()  # who waits goes on with all that can come
        self.steady = waited or (not pieces and not len(new))
        if not len(slots_B):
            return []
        assert logits_NV is not None
        if self._need_not_look(logits_NV):
            self._begin_unseen(slots_B, logits_NV, source_B)
            return []
        self._sample(slots_B, logits_NV, source_B)
        return self._finish(self._ended(slots_B), steady=waited)

    def _alone(self, decoding: np.ndarray) -> bool:
        """Whether nothing can happen to these rows but their own next tokens, plainly sampled."""
        if self.tokens_per_step == 1 or not len(decoding) or (self.queue.prompts and not self.steady):
            return False
        return self._plain(decoding)

    def _plain(self, decoding: np.ndarray) -> bool:
        """Whether these rows need nothing but their next tokens, plainly sampled."""
        return not (self.slots.special[decoding].any() or self.slots.by_text[decoding].any())

    def _catch_up(self) -> None:
        """Know of all that the decoder has made; it begins nothing more."""
        if self.slots.under_way[self.slots.active].any():
            self.late |= self._go_on(self.slots.active, steps=0) or {}

    def _go_on(self, decoding: np.ndarray, steps: int | None = None) -> dict[int, str] | None:
        """Several tokens for every row, up to its end: the rows that ended, and why; None if the decoder cannot.

        Of a decoder that runs ahead this begins the next tokens and gives those begun before, so that the rows here lag
        behind it. Rows that end or are aborted leave blocks to others while it still reads (or writes) them: what
        computes the others' tokens is queued on the device behind that.
        """
        slots, steps = self.slots, self._steps(decoding) if steps is None else steps
        ended = {} if steps else self._see_first()
        before, known = slots.count[decoding], int(slots.next_history[0])
        rows = DecodeRows(
            **{name: slots.columns[column][decoding] for name, column in _COLUMNS_OF_ROWS.items()},
            table=slots.table[decoding],
            starts=slots.starts[decoding],
            stop_sets=slots.stop_sets,
            next_history=slots.next_history,
            steps=steps,
            stop_at_end=bool(self.queue.prompts),
            first=FirstTokens.joined(self.first) if self.first else None,
        )
        if not self.decoder.decode(rows, self.pool.layer):
            return None
        self.first = []
        made = rows.counts - before
        row, step = np.nonzero(np.arange(rows.tokens.shape[1]) < made[:, None])
        places = (decoding[row], before[row] + step)
        slots.tokens[places], slots.log_probs[places] = rows.tokens[row, step], rows.log_probs[row, step]
        slots.last[decoding], slots.length[decoding], slots.count[decoding] = rows.last, rows.positions, rows.counts
        slots.history[decoding], slots.under_way[decoding] = rows.histories, rows.under_way
        self.response_tokens += int(slots.next_history[0]) - known  # each that was computed got a history
        reasons = {1: "stop", 2: "length"}
        return ended | {int(decoding[place]): reasons[int(rows.ended[place])] for place in np.flatnonzero(rows.ended)}

    def _steps(self, decoding: np.ndarray) -> int:
        """How many tokens the rows may make before anybody looks."""
        slots = self.slots
        left = slots.limit[decoding] - slots.count[decoding] - slots.under_way[decoding]
        most = min(self.tokens_per_step, max(0, int(left.max())))
        if self.tokens_unseen is None:
            return most
        may_stop = any(slots.stop_sets[kind] for kind in np.unique(slots.stops[decoding]))
        return min(most, self.tokens_unseen if may_stop else max(self.tokens_unseen, int(left.min())))

    def _forward(self, decoding: np.ndarray, pieces: list[Piece]) -> torch.Tensor | None:
        """Logits of the decoding rows, then of the prompts that this step completes."""
        if not len(decoding) and not pieces:
            return None
        slots, total = self.slots, len(decoding)
        ids, positions = [slots.last[decoding]], [slots.length[decoding]]
        rows, wanted = [np.arange(total, dtype=np.int32)], list(range(total))
        for number, (prompt, start, end) in enumerate(pieces, start=total):
            ids.append(np.asarray(prompt.ids[start:end], np.int64))
            positions.append(np.arange(start, end, dtype=np.int32))
            rows.append(np.full(end - start, number, np.int32))
            prompt.computed, total = end, total + end - start
            if prompt.ready:
                prompt.place = len(wanted)
                wanted.append(total - 1)
        slots.length[decoding] += 1
        slots.tell_apart(decoding)
        self.response_tokens += len(decoding)
        self.prompt_tokens += total - len(decoding)
        running = (slots.table[decoding], slots.starts[decoding])
        table = with_rows(running, [prompt.blocks for prompt, _, _ in pieces])
        step = step_tokens(ids, positions, rows, table, self.pool.device)
        wanted_N = None if len(wanted) == total else cuda.to_device(torch.tensor(wanted).long(), self.pool.device)
        hidden_NE = self.decoder.hidden(step, self.pool.layer, wanted_N)
        return self.decoder.logits(hidden_NE) if wanted else None

    def _start_rows(self) -> tuple[np.ndarray, list[Prompt]]:
        """Rows for the requests whose prompts are computed, as far as there is room: (slots, their prompts)."""
        rows = list(self.queue.start(self.slots.room))
        self._copy_if_long(request for request, _, _ in rows)
        return self.slots.add(rows), [prompt for _, prompt, _ in rows]

    def _copy_if_long(self, requests: Iterable[Request]) -> None:
        tokens = [request.sampling.max_tokens for request in requests]
        if max(tokens, default=0) >= MANY or sum(tokens) >= MANY_TOKENS:
            self.copies_pay = True
            self.decoder.make_fast_copies()

    def _sample(self, slots_B: np.ndarray, logits_NV: torch.Tensor, source_B: np.ndarray) -> None:
        """The next token of every row."""
        slots = self.slots
        places_B = slots.count[slots_B]
        tokens_B, log_probs_B = sample_plain(
            logits_NV, source_B, slots.temperature[slots_B], slots.greedy[slots_B], slots.seed[slots_B], places_B
        )
        special = np.flatnonzero(slots.special[slots_B])
        if len(special):
            requests: list[Request] = [slots.requests[slot] for slot in slots_B[special]]  # pyright: ignore
            seen = [(r.prompt_ids, slots.written(slot)) for r, slot in zip(requests, slots_B[special], strict=True)]
            logits_BV = logits_NV[torch.from_numpy(source_B[special]).to(logits_NV.device)]
            uniform_B = torch.from_numpy(uniforms(slots.seed[slots_B[special]], places_B[special]))
            some = sample(logits_BV, [r.sampling for r in requests], uniform_B, seen)
            tokens_B[special], log_probs_B[special], drawn = (x.cpu().numpy() for x in some)
            for slot, value in zip(slots_B[special].tolist(), drawn.tolist(), strict=True):
                slots.drawn.setdefault(slot, []).append(value)
        slots.tokens[slots_B, places_B] = slots.last[slots_B] = tokens_B
        slots.log_probs[slots_B, places_B] = log_probs_B
        slots.count[slots_B] += 1

    def _need_not_look(self, logits_NV: torch.Tensor) -> bool:
        """Whether the first tokens of new rows can stay on the device, where the decoder goes on with them: to read
        them here would be to wait for all that the device has to do, and leave it idle afterwards."""
        return self.tokens_unseen is not None and cuda.runs_here(logits_NV) and self._plain(self.slots.active)

    def _begin_unseen(self, new: np.ndarray, logits_NV: torch.Tensor, source_B: np.ndarray) -> None:
        slots = self.slots
        settings = (slots.columns[name][new] for name in ("temperature", "greedy", "seed", "count"))
        self.first.append(FirstTokens(slots.number[new], *sample_unread(logits_NV, source_B, *settings)))
        slots.under_way[new] = 1
        slots.length[new] -= 1  # as before the last token of the prompt, which gives the first of the response

    def _see_first(self) -> dict[int, str]:
        """Read the first tokens that nobody has gone on with yet; the rows that end with them, and why."""
        slots, found = self.slots, {}
        for first in self.first:
            place = first.places(slots.number[slots.active])
            seen, place = slots.active[place >= 0], place[place >= 0]
            slots.tokens[seen, 0] = slots.last[seen] = first.tokens.cpu().numpy()[place]
            slots.log_probs[seen, 0] = first.log_probs.cpu().numpy()[place]
            slots.count[seen], slots.under_way[seen] = 1, 0
            slots.length[seen] += 1
            found |= self._ended(seen)
        self.first = []
        return found

    # -- ends -----------------------------------------------------------------------------------------------------
    def _ended(self, slots_B: np.ndarray) -> dict[int, str]:
        """Rows that are finished, and why."""
        slots = self.slots
        stopped = slots.stopped(slots_B)
        for place in np.flatnonzero(slots.by_text[slots_B] & ~stopped):
            stopped[place] = self._stopped_by_text(slots_B[place])
        full = slots.count[slots_B] >= slots.limit[slots_B]
        ended = np.flatnonzero(stopped | full)
        return {int(slots_B[place]): "stop" if stopped[place] else "length" for place in ended}

    def _stopped_by_text(self, slot: int) -> bool:
        """Whether the newest token completed a stop string. A token is at least one byte, so a short tail tells."""
        request = self.slots.requests[slot]
        assert request is not None and self.decode is not None
        longest = max(len(stop.encode()) for stop in request.sampling.stop)
        text = self.decode(self.slots.written(slot)[-(longest + 8) :])
        return any(stop in text for stop in request.sampling.stop)

    def _finish(self, ended: dict[int, str], *, steady: bool = False) -> list[Output]:
        """Outputs of these rows; their slots and blocks are free again, for others now or (`steady`) a step later."""
        if not ended:
            return []
        slots, self.steady = self.slots, steady
        outputs = slots.outputs(ended, self.version)
        for slot in ended:
            prompt, request = slots.prompts[slot], slots.requests[slot]
            assert prompt is not None and request is not None
            if request.keep:
                ids = [*prompt.ids, *slots.written(slot)][: slots.length[slot]]  # the newest token may not be there yet
                self.queue.leave(request.id, Left(ids, prompt, slots.blocks[slot]))
            else:
                self.queue.row_done(prompt, slots.blocks[slot])
            slots.drop(slot)
        slots.active = slots.active[~np.isin(slots.active, list(ended))]
        return outputs

    # -- weights and memory ---------------------------------------------------------------------------------------
    @torch.no_grad()
    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        self.check_awake("weights")
        pool = self.pool.empty_twin() if "cache" in self.asleep else self.pool  # a twin is gone with the call
        scores: list[torch.Tensor] = []
        if self.copies_pay and sum(map(len, token_ids)) <= FEW:
            self.decoder.make_fast_copies()  # what is scored now will be decoded with next
        for batch in self._score_batches(token_ids, pool):
            blocks = [pool.take(blocks_for(len(row))) for row in batch]
            rows = [np.full(len(row), number, np.int32) for number, row in enumerate(batch)]
            positions = [np.arange(len(row), dtype=np.int32) for row in batch]
            ids = [np.asarray(row, np.int64) for row in batch]
            none = np.zeros((0, 1), np.int32)
            table = with_rows((none, none), blocks)
            step = step_tokens(ids, positions, rows, table, pool.device)
            hidden_TE = self.decoder.hidden(step, pool.layer)
            log_probs_T = log_probs_of(self.decoder.logits, hidden_TE[:-1], step.ids_T[1:], temperature).cpu()
            ends = np.cumsum([len(row) for row in batch])
            scores += [log_probs_T[end - len(row) : end - 1] for row, end in zip(batch, ends.tolist(), strict=True)]
            for held in blocks:
                pool.give_back(held)
        return scores

    def _score_batches(self, token_ids: Sequence[Sequence[int]], pool: Pool) -> Iterator[list[Sequence[int]]]:
        batch, tokens, blocks = [], 0, 0
        for row in token_ids:
            pool.check(len(row), 0)
            more = blocks_for(len(row))
            if batch and (tokens + len(row) > self.budget or not pool.fits(blocks + more)):
                yield batch
                batch, tokens, blocks = [], 0, 0
            batch, tokens, blocks = [*batch, row], tokens + len(row), blocks + more
        if batch:
            yield batch

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.check_awake("weights")
        self._catch_up()  # what is under way is made by the old weights, and counted as theirs
        for slot in self.slots.active.tolist():
            self.slots.note_version(slot, self.version)
        self.queue.forget()
        self.steady = False
        self.decoder.drop_fast_copies()
        self.decoder.load(weights)
        self.version = version

    def cache_bytes(self) -> int:
        return self.pool.held_bytes()

    def _give_back(self) -> None:
        if len(self.slots.active):
            raise RuntimeError("the engine still has running requests; abort them before sleep")
        self.queue.forget()
        self.pool.sleep()
        self.decoder.drop_fast_copies()

    def _take(self, stage: Stage) -> None:
        """Weights are where they were, the trainer's own; the cache grows again when the first request needs it."""


def _sources(logits_NV: torch.Tensor | None, decoding: int, prompts: list[Prompt]):
    """The logits that the rows of a step sample from, and which of them each row takes: the decoding rows first, then
    the new ones, whose prompts were computed in this step or kept their logits from an earlier one."""
    places, stored = list(range(decoding)), []
    first = 0 if logits_NV is None else len(logits_NV)
    for prompt in prompts:
        if prompt.place < 0:
            prompt.place = first + len(stored)
            stored.append(prompt.logits_V)
        places.append(prompt.place)
    if stored:
        logits_NV = torch.stack(stored) if logits_NV is None else torch.cat([logits_NV, torch.stack(stored)])
    return logits_NV, np.asarray(places, np.int64)
