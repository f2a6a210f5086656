"""The native engine: continuous batching with a paged cache, over weights that the trainer already holds.

A step admits requests while blocks and slots are free, computes one flat batch (the newest token of every running row,
and pieces of new prompts up to a budget), and samples one token of every row whose logits are there (`next_tokens.py`).
Equal prompts are computed once (`admission.py`). While no request can join, rows decode several tokens in one step
if the decoder supports it (`rounds.py`); rows with an identical prefix share one decode. Few rows may have drafts of
their next tokens verified instead (`speculation.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import numpy as np
import torch

from posttrain.kernels.decode import BLOCK
from posttrain.rollout.base import Output, Request, RolloutEngine, Stage
from posttrain.rollout.native.admission import SEGMENT, SEGMENT_AHEAD, Queue
from posttrain.rollout.native.decoder import Decoder, score_rows
from posttrain.rollout.native.next_tokens import forward, sample_next, sources
from posttrain.rollout.native.pool import Pool
from posttrain.rollout.native.prompts import Prompt
from posttrain.rollout.native.rounds import Drafted, Ended, Rounds
from posttrain.rollout.native.slots import Slots
from posttrain.rollout.native.speculation import Speculation

MANY, MANY_TOKENS = 16, 512  # steps of a row, or tokens of all rows, for which it pays to lay weights out anew
FEW = 512  # prompt tokens for which weights laid out for decoding are as good as any


class NativeEngine(RolloutEngine):
    """Decodes with `decoder`; `decode` turns ids into text for stop strings.

    Weights that arrive between two steps: rows that are running keep the keys and values that older weights computed;
    waiting prompts and kept turns are computed anew.
    """

    updates_in_flight = True

    def __init__(
        self,
        decoder: Decoder,
        pool: Pool,
        *,
        max_num_seqs: int = 1024,
        max_num_batched_tokens: int,
        tokens_per_step: int = 1,
        tokens_unseen: int | None = None,
        decode: Callable[[list[int]], str] | None = None,
        shares_weights: bool = True,
        ranks: int = 1,
        speculation: Speculation | None = None,
    ) -> None:
        self.decoder, self.pool, self.decode, self.shares_weights = decoder, pool, decode, shares_weights
        self.ranks, self.speculation = ranks, speculation
        self.budget, self.slots = max_num_batched_tokens, Slots(max_num_seqs)
        self.queue = Queue(pool, SEGMENT if tokens_unseen is None else SEGMENT_AHEAD)
        lengths = {"tokens_per_step": tokens_per_step, "tokens_unseen": tokens_unseen}
        self.rounds = Rounds(decoder, pool, self.slots, self._ended, **lengths)
        self.steady = False  # whether no request can be admitted before a row ends
        self.copies_pay = False  # whether requests are long enough to pay for packed copies of the weights
        self.copies_due = False  # whether those of new weights are to be made, by the next step
        self.prompt_tokens = 0  # computed since the engine was made
        self.late: Ended = {}  # rows whose end was noticed between steps

    # -- requests -------------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> None:
        self.check_request(request)
        self.queue.add(request)
        self.steady = False

    def has_work(self) -> bool:
        return bool(self.queue.prompts or len(self.slots.active))

    def abort(self, ids: Iterable[Hashable]) -> list[Output]:
        wanted, slots, self.steady = set(ids), self.slots, False
        removed = self.queue.remove(wanted)
        gone = [
            Output(request.id, [], [], "abort", []) if progress is None else progress.output(request, "abort")
            for request, progress in removed
        ]
        if self.speculation is not None:
            for request, progress in removed:
                if progress is not None:
                    self.speculation.end(request, np.asarray(progress.tokens, np.int64))
        leaving = [slot for slot in slots.active.tolist() if slots.requests[slot].id in wanted]  # pyright: ignore
        reasons = {slot: self.late.pop(slot, "abort") for slot in leaving}
        return gone + self._finish(
            {slot: "abort" if self._has_budget_left(slot, why) else why for slot, why in reasons.items()}
        )

    def release(self, ids: Iterable[Hashable]) -> None:
        self.queue.release(ids)

    def running_tokens(self) -> int:
        return int(self.slots.count[self.slots.active].sum())

    def ahead_s(self) -> float:
        return self.rounds.due - time.monotonic()

    def so_far(self, ids: Collection[Hashable]) -> list[Output]:
        slots = self.slots
        running = [(slot, slots.requests[slot]) for slot in slots.active.tolist()]
        return [
            Output(request.id, slots.written(slot), slots.log_probs[slot, : slots.count[slot]].tolist(), "")
            for slot, request in running
            if request is not None and request.id in ids
        ]

    def take_counts(self) -> dict[str, float]:
        return {} if self.speculation is None else self.speculation.take_counts()

    @property
    def response_tokens(self) -> int:
        """Computed since the engine was made."""
        return self.slots.computed

    # -- a step ---------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self) -> list[Output]:
        self._renew_copies()
        decoding = self.slots.active
        plain = self.slots.plain(decoding)
        width = self._draft_width(decoding)
        if not plain or width > 1:
            self.late |= self.rounds.collect()
        if self.late:
            ended, self.late = self.late, {}
            return self._finish(ended)
        if width > 1:
            return self._speculate(decoding, width, plain=plain)
        if plain and self.rounds.tokens_per_step > 1 and self._alone(decoding):
            ended = self.rounds.run(decoding, stop_at_end=bool(self.queue.prompts))
            if ended is not None:
                return self._finish(ended)
        # Where many tokens go in one captured step, the running rows wait for it rather than take one here.
        waits = plain and self.rounds.tokens_unseen is not None
        return self._one_token(decoding, decoding[:0] if waits else decoding)

    def _alone(self, decoding: np.ndarray) -> bool:
        """Whether these rows can decode several tokens: no request can join them before one of them ends."""
        return bool(len(decoding)) and (self.steady or not self.queue.prompts)

    def _draft_width(self, decoding: np.ndarray) -> int:
        """Tokens of each row in the next pass: more than one if drafts pay."""
        if self.speculation is None or not self._alone(decoding):
            return 1
        return self.speculation.width(self.slots, decoding)

    def _speculate(self, decoding: np.ndarray, width: int, *, plain: bool) -> list[Output]:
        """Draft the next tokens of these rows, and verify them: pass after pass within a round, or in one pass."""
        speculation, slots, rounds = self.speculation, self.slots, self.rounds
        assert speculation is not None
        if plain and rounds.tokens_unseen is None and rounds.tokens_per_step > 1:
            drafts, before = speculation.drafts(slots, decoding, rounds.tokens_per_step), slots.count[decoding]
            drafted = Drafted(drafts, width)
            ended = rounds.run(decoding, stop_at_end=bool(self.queue.prompts), drafts=drafted)
            if ended is not None:
                speculation.note_round(slots, decoding, before, drafted)
                return self._finish(ended)
        drafts = speculation.drafts(slots, decoding, width)
        speculation.verify(rounds, decoding, drafts, self._stopped_by_text)
        return self._finish(self._ended(decoding))

    def _one_token(self, decoding: np.ndarray, moved: np.ndarray) -> list[Output]:
        """Admit what there is room for; the next token of the rows in `moved`, and the first of new ones."""
        self.queue.open(self.slots.room)
        pieces = self.queue.next_pieces(max(self.budget - len(moved), BLOCK))
        fresh = sum(end - start for _, start, end in pieces)
        if fresh <= FEW:
            self._pack_weights_if_long(request for prompt, _, _ in pieces for request in prompt.waiting)
        self.prompt_tokens += fresh
        logits_NV = forward(self.decoder, self.pool, self.slots, moved, pieces)
        new, prompts = self._start_rows()
        logits_NV, source_B = sources(logits_NV, len(moved), prompts)
        for prompt in (*prompts, *(prompt for prompt, _, _ in pieces if prompt.ready)):
            if not prompt.waiting:
                prompt.logits_V = None
            elif prompt.logits_V is None and prompt.place >= 0:
                prompt.logits_V = logits_NV[prompt.place].clone()  # pyright: ignore
            prompt.place = -1
        self.slots.active = np.concatenate([decoding, new])
        slots_B = np.concatenate([moved, new])
        if not len(self.slots.active) and not pieces:
            # Nothing runs and nothing could start, which happens where requests with other budgets or layouts have
            # come to fit no more. Without kept turns and open prompts the first one always has room.
            self.queue.forget()
        # Running rows that waited for this step decode again only when all that could be admitted is there.
        waited = len(moved) < len(decoding) and not self.queue.unfinished()
        self.steady = waited or (not pieces and not len(new))
        if not len(slots_B):
            return []
        assert logits_NV is not None
        if self.rounds.can_stay_on_device(logits_NV):
            self.rounds.start_on_device(slots_B, logits_NV, source_B)
            return []
        sample_next(self.slots, slots_B, logits_NV, source_B)
        return self._finish(self._ended(slots_B), steady=waited)

    def _start_rows(self) -> tuple[np.ndarray, list[Prompt]]:
        """Rows for the requests whose prompts are computed, as far as there is room: (slots, their prompts)."""
        rows = list(self.queue.start(self.slots.room))
        self._pack_weights_if_long(row.request for row in rows)
        return self.slots.add(rows), [row.prompt for row in rows]

    def _pack_weights_if_long(self, requests: Iterable[Request]) -> None:
        tokens = [request.sampling.max_tokens for request in requests]
        if max(tokens, default=0) >= MANY or sum(tokens) >= MANY_TOKENS:
            self.copies_pay = True
            self.decoder.make_fast_copies()

    def _renew_copies(self) -> None:
        # By the first step after new weights, never by a score: a clock decides whether their probe comes before that
        # step, and a step makes more tokens with copies. A replay counts steps.
        if self.copies_due:
            self.decoder.make_fast_copies()
            self.copies_due = False

    # -- ends -----------------------------------------------------------------------------------------------------
    def _ended(self, slots_B: np.ndarray) -> Ended:
        """Which of these rows ended with their newest tokens, and why."""
        slots = self.slots
        stopped = slots.stopped(slots_B)
        for place in np.flatnonzero(slots.by_text[slots_B] & ~stopped):
            stopped[place] = self._stopped_by_text(slots_B[place])
        full = slots.count[slots_B] >= slots.limit[slots_B]
        ended = np.flatnonzero(stopped | full)
        return {int(slots_B[place]): "stop" if stopped[place] else "length" for place in ended}

    def _stopped_by_text(self, slot: int) -> bool:
        """Whether the newest token completed a stop string."""
        request = self.slots.requests[slot]
        assert request is not None
        return request.sampling.stopped_by_text(self.slots.written(slot), self.decode)

    def _has_budget_left(self, slot: int, reason: str) -> bool:
        """Whether the row has only come to the end of the tokens that it was granted."""
        request = self.slots.requests[slot]
        assert request is not None
        return reason == "length" and self.slots.count[slot] < request.sampling.max_tokens

    def _extend_or_preempt(self, slot: int) -> bool:
        """Grant a row further tokens. False: there is no room, and it waits in the queue."""
        slots = self.slots
        request, prompt, blocks = slots.requests[slot], slots.prompts[slot], slots.blocks[slot]
        assert request is not None and prompt is not None
        slots.under_way[slot] = 0  # what a decoder has begun of it ended with the grant
        tokens, left = int(slots.length[slot]) + 1, request.sampling.max_tokens - int(slots.count[slot])
        granted = self.queue.extend(tokens, prompt.gap, blocks, left)
        if granted:
            slots.extend(slot, granted)
            return True
        progress = slots.save(slot, self.version)
        self.queue.preempt(request, progress, blocks, prompt.gap, slots.take_state(slot))
        return False

    def _finish(self, ended: Ended, *, steady: bool = False) -> list[Output]:
        """Outputs of these rows; their slots and blocks are free again, for others now or (`steady`) a step later."""
        slots = self.slots
        unfinished = [slot for slot, reason in ended.items() if self._has_budget_left(slot, reason)]
        ended = {slot: reason for slot, reason in ended.items() if slot not in unfinished}
        if ended:
            self.steady = steady
        outputs = slots.outputs(ended, self.version) if ended else []
        if outputs and self.pool.routes is not None:
            self._add_routes(list(ended), outputs)
        for slot in ended:
            prompt, request = slots.prompts[slot], slots.requests[slot]
            assert prompt is not None and request is not None
            if self.speculation is not None:
                self.speculation.end(request, slots.tokens[slot, : slots.count[slot]])
            if request.keep:
                ids = [*request.prompt_ids, *slots.written(slot)][: slots.length[slot]]  # the newest may not be there
                self.queue.kept.keep(request.id, ids, slots.blocks[slot], prompt.gap, slots.take_state(slot))
        self._leave(list(ended))  # first: rows that go on may need their blocks
        if preempted := [slot for slot in unfinished if not self._extend_or_preempt(slot)]:
            self.steady = False
            self._leave(preempted)
        return outputs

    def _add_routes(self, ended: list[int], outputs: list[Output]) -> None:
        """Give outputs the experts of their tokens in the cache: the newest token was not computed yet."""
        slots = self.slots
        tokens = [len(slots.requests[slot].prompt_ids) + int(slots.count[slot]) - 1 for slot in ended]  # pyright: ignore
        rows = [(slots.blocks[slot], int(slots.gap[slot]), count) for slot, count in zip(ended, tokens, strict=True)]
        for output, routes in zip(outputs, self.pool.read_routes(rows), strict=True):
            output.routes = routes

    def _leave(self, leaving: list[int]) -> None:
        """Free the slots and blocks of these rows."""
        for slot in leaving:
            prompt, state = self.slots.prompts[slot], self.slots.take_state(slot)
            self.queue.row_done(prompt, self.slots.blocks[slot], state)  # pyright: ignore
            self.slots.drop(slot)
        if leaving:
            self.slots.active = self.slots.active[~np.isin(self.slots.active, leaving)]

    # -- weights and memory ---------------------------------------------------------------------------------------
    @torch.no_grad()
    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        self.check_awake("weights")
        # A twin is gone with the call; running rows may have filled the pool.
        pool = self.pool.empty_twin() if "cache" in self.asleep or self.has_work() else self.pool
        # Whether there are copies depends on a clock where weights arrive in flight, and scores are metrics of a run.
        with self.decoder.without_fast_copies():
            return score_rows(self.decoder, pool, token_ids, temperature, self.budget)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.check_awake("weights")
        self.late |= self.rounds.collect()  # what is under way is made by the old weights, and counted as theirs
        self.slots.note_version(self.slots.active.tolist(), self.version)
        self.queue.forget()
        self.steady = False
        self.decoder.drop_fast_copies()
        self.decoder.load(weights)
        self.version, self.copies_due = version, self.copies_pay

    def cache_bytes(self) -> int:
        return self.pool.held_bytes()

    def cache_tokens(self) -> int:
        return self.pool.limit * BLOCK

    def _give_back(self) -> None:
        if self.speculation is not None:
            self.speculation.forget()
        self.queue.forget()
        self.pool.sleep()
        # As a new engine: a run that is resumed here makes the same steps, which are fewer with copies.
        self.copies_pay = self.copies_due = False
        self.decoder.drop_fast_copies()

    def let_go(self) -> None:
        self.decoder.let_go()

    def _take(self, stage: Stage) -> None:
        """Weights are where they were, the trainer's own; the cache grows again when the first request needs it."""
