"""Several tokens for every row in one step, while no request can join or leave.

A decoder may run ahead of the host (`DecodeRows`): what the host knows of its rows is a round old. First tokens of new
rows then stay on the device, and the decoder continues from them before the host has read them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.kernels import cuda
from posttrain.kernels.whole_step import DecodeRows, FirstTokens
from posttrain.rollout.native.decoder import Decoder
from posttrain.rollout.native.pool import Pool
from posttrain.rollout.native.slots import Slots
from posttrain.rollout.sampling import sample_unread

_COLUMNS_OF_ROWS = {
    "last": "last", "positions": "length", "counts": "count", "limits": "limit", "seeds": "seed",
    "temperatures": "temperature", "greedy": "greedy", "stops": "stops", "histories": "history", "numbers": "number",
    "under_way": "under_way", "gaps": "gap",
}  # fmt: skip
_REASONS = {1: "stop", 2: "length"}
# How much of a round's time new rows may take to come. The rest is for the host, which admits hundreds of them and
# begins the next round in some tens of milliseconds: a device that waits costs more than rows that come a round later.
_OPEN_SHARE, _BEGIN_S = 0.8, 0.05
Ended = dict[int, str]
"""Slots of rows that have ended, and why."""


@dataclass
class Drafted:
    """Drafts of rows' next tokens, of which a pass has less than `width`; and what a round made of them, by row."""

    tokens: list[list[int]]
    width: int
    passes: np.ndarray = field(init=False)  # those with a draft
    tried: np.ndarray = field(init=False)  # drafted tokens in these


class Rounds:
    """Rounds of up to `tokens_per_step` tokens; `ended` says which of some slots have ended with their newest token.

    `tokens_unseen`: where a row that ends within a round stands still until it is over, the length of a round in which
    rows may end.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: Pool,
        slots: Slots,
        ended: Callable[[np.ndarray], Ended],
        *,
        tokens_per_step: int,
        tokens_unseen: int | None,
    ) -> None:
        self.decoder, self.pool, self.slots, self.ended = decoder, pool, slots, ended
        self.tokens_per_step, self.tokens_unseen = tokens_per_step, tokens_unseen
        self.first: list[FirstTokens] = []  # of rows that the decoder has not started yet
        self.due = 0.0  # when the next round is to be begun, so that the device does not wait

    def collect(self) -> Ended:
        """Read all that the decoder has made; it begins nothing more."""
        active = self.slots.active
        return self._round(active, 0, False) or {} if self.slots.under_way[active].any() else {}

    def run(self, decoding: np.ndarray, *, stop_at_end: bool, drafts: Drafted | None = None) -> Ended | None:
        """Several tokens for every row, up to its end: the rows that ended; None if the decoder cannot. With
        `stop_at_end` the round is over as soon as one has. With `drafts` a pass verifies several tokens of a row.

        Of a decoder that runs ahead this begins the next tokens and gives those begun before. Rows that end or are
        aborted leave blocks to others while it still reads (or writes) them: what computes the others' tokens is queued
        on the device behind that.
        """
        return self._round(decoding, self._steps(decoding), stop_at_end, drafts)

    def _round(
        self, decoding: np.ndarray, steps: int, stop_at_end: bool, drafts: Drafted | None = None
    ) -> Ended | None:
        slots = self.slots
        ended = {} if steps else self._read_first_tokens()
        before, known = slots.count[decoding], int(slots.next_history[0])
        columns: dict[str, Any] = {name: slots.columns[column][decoding] for name, column in _COLUMNS_OF_ROWS.items()}
        rows = DecodeRows(
            **columns,
            table=slots.table[decoding],
            starts=slots.starts[decoding],
            stop_sets=slots.stop_sets,
            next_history=slots.next_history,
            steps=steps,
            stop_at_end=stop_at_end,
            first=FirstTokens.joined(self.first) if self.first else None,
            drafts=None if drafts is None else [draft[: steps - 1] for draft in drafts.tokens],
            width=1 if drafts is None else drafts.width,
        )
        if not self.decoder.decode(rows, self.pool.layer, self.pool.routes_PLK):
            return None
        self.due = time.monotonic() + _OPEN_SHARE * rows.busy_s - _BEGIN_S
        self.first = []
        if drafts is not None:
            drafts.passes, drafts.tried = rows.passes, rows.tried
        made = rows.counts - before
        row, step = np.nonzero(np.arange(rows.tokens.shape[1]) < made[:, None])
        places = (decoding[row], before[row] + step)
        slots.tokens[places], slots.log_probs[places] = rows.tokens[row, step], rows.log_probs[row, step]
        slots.last[decoding], slots.length[decoding], slots.count[decoding] = rows.last, rows.positions, rows.counts
        slots.history[decoding], slots.under_way[decoding] = rows.histories, rows.under_way
        slots.computed += int(slots.next_history[0]) - known  # each that was computed got a history
        if rows.under_way.any():  # the device is at the next ones
            slots.read(decoding.tolist())
            gc.collect(0)  # now, and not when rows end: it would walk through all that was read
        over = np.flatnonzero(rows.ended)
        reasons = (_REASONS[code] for code in rows.ended[over].tolist())
        return ended | dict(zip(decoding[over].tolist(), reasons, strict=True))

    def sample_each(
        self, slots_T: np.ndarray, ids_T: np.ndarray, ahead_T: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """(tokens, log-probs): what follows each of these tokens, of which `ahead_T[t]` are drafts of row `slots_T[t]`.
        In a captured step each is a row of its own; None where steps are not captured."""
        slots = self.slots
        if self.tokens_unseen is None or not slots.plain(slots_T):
            return None
        given: dict[str, Any] = {name: slots.columns[column][slots_T] for name, column in _COLUMNS_OF_ROWS.items()}
        given["last"], given["positions"] = ids_T.astype(np.int64), given["positions"] + ahead_T.astype(np.int32)
        given["counts"] = given["counts"] + ahead_T
        given["numbers"] = -2 - np.arange(len(ids_T))  # of no row, and not FREE
        rows = DecodeRows(
            **given,
            table=slots.table[slots_T],
            starts=slots.starts[slots_T],
            stop_sets=slots.stop_sets,
            next_history=slots.next_history.copy(),
            steps=1,
            stop_at_end=False,
            together=True,
        )
        if not self.decoder.decode(rows, self.pool.layer, self.pool.routes_PLK):
            return None
        rows.steps = 0  # give what was begun, and keep nothing of these rows
        self.decoder.decode(rows, self.pool.layer, self.pool.routes_PLK)
        return rows.tokens[:, 0].astype(np.int64), rows.log_probs[:, 0]

    def _steps(self, decoding: np.ndarray) -> int:
        """How many tokens the rows may decode before the host looks at them."""
        slots = self.slots
        left = slots.limit[decoding] - slots.count[decoding] - slots.under_way[decoding]
        most = min(self.tokens_per_step, max(0, int(left.max())))
        if self.tokens_unseen is None:
            return most
        may_stop = any(slots.stop_sets[kind] for kind in np.unique(slots.stops[decoding]))
        if may_stop:
            return min(most, self.tokens_unseen)
        # The last round before an end is short: its results cannot be read while the device computes something else.
        return min(most, max(self.tokens_unseen, int(left.min()) - self.tokens_unseen))

    # -- first tokens -----------------------------------------------------------------------------------------------
    def can_stay_on_device(self, logits_NV: torch.Tensor) -> bool:
        """Whether the first tokens of new rows can stay on the device. Reading them would wait for all work that is
        queued there, and leave the device idle afterwards."""
        return self.tokens_unseen is not None and cuda.runs_here(logits_NV) and self.slots.plain(self.slots.active)

    def start_on_device(self, new: np.ndarray, logits_NV: torch.Tensor, source_B: np.ndarray) -> None:
        slots = self.slots
        settings = (slots.columns[name][new] for name in ("temperature", "greedy", "seed", "count"))
        self.first.append(FirstTokens(slots.number[new], *sample_unread(logits_NV, source_B, *settings)))
        slots.under_way[new] = 1
        slots.length[new] -= 1  # as before the last token of the prompt, which gives the first of the response

    def _read_first_tokens(self) -> Ended:
        """Read the first tokens that the decoder has not continued from; returns the rows that end with them."""
        slots, found = self.slots, {}
        for first in self.first:
            place = first.places(slots.number[slots.active])
            seen, place = slots.active[place >= 0], place[place >= 0]
            at = slots.count[seen]  # 0, or the tokens that a row had made before it was preempted
            slots.tokens[seen, at] = slots.last[seen] = first.tokens.cpu().numpy()[place]
            slots.log_probs[seen, at] = first.log_probs.cpu().numpy()[place]
            slots.count[seen], slots.under_way[seen] = at + 1, 0
            slots.length[seen] += 1
            found |= self.ended(seen)
        self.first = []
        return found
