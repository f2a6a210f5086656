"""Speculation that changes nothing: several drafted tokens of each row are verified in one pass.

Every position of a draft is sampled with its own random number, a hash of (seed, position), from the logits that plain
decoding would have. A drafted token counts only if it is the one that was sampled; the first that differs is a sample
like any other, and the rest of the draft is discarded. Its keys and values lie behind the row's end, where the next
tokens overwrite them.

Whether it pays is decided by counts alone (rows, tokens, how many drafted tokens were sampled), never by a clock: a run
can be repeated. While it does not pay, what was decoded is compared with what would have been drafted.

Shapes: B rows, T tokens of all rows in a pass, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from posttrain.rollout.base import Request
from posttrain.rollout.native.decoder import step_tokens
from posttrain.rollout.native.drafts import Drafts
from posttrain.rollout.native.next_tokens import draw
from posttrain.rollout.native.rounds import Drafted, Rounds
from posttrain.rollout.native.slots import Slots
from posttrain.texts import common_start

WIDEST = 16  # tokens of a row in one pass
MOST_ROWS = 32  # drafts are made on the host, row by row
LOOK, LOOK_MOST = 32, 512  # tokens of a row between two looks at what would have been drafted
GAIN = 1.2  # what speculation must promise before it starts
MEMORY = 0.9  # weight of earlier passes in the share of drafted tokens that are sampled


@dataclass(frozen=True)
class PassCost:
    """What a pass costs, in units of one more row of plain decoding: `block` for each started `tile` of tokens, as
    products compute whole tiles, `token` for each drafted token, `host` for finding drafts and reading results."""

    tile: int
    block: float
    token: float
    host: float

    def rate(self, rows: int, width: int, share: float) -> float:
        """Tokens for the cost of one, if drafted tokens are sampled with this probability."""
        expected = width if share >= 1 else (1 - share**width) / (1 - share)
        blocks, drafted = -(-rows * width // self.tile), rows * (width - 1)
        cost = self.block * blocks + rows + self.token * drafted + (self.host if drafted else 0)
        return rows * expected / cost

    def best_width(self, rows: int, share: float, gain: float) -> int:
        """Tokens of each row with which a pass gives most for its cost; 1 is plain decoding."""
        rates = {width: self.rate(rows, width, share) for width in range(2, WIDEST + 1)}
        best = max(rates, key=lambda width: rates[width])
        return best if rates[best] > gain * self.rate(rows, 1, share) else 1


class Speculation:
    """Drafts, when to use them, and the pass that verifies them."""

    def __init__(self, drafts: Drafts, cost: PassCost) -> None:
        self.texts, self.cost = drafts, cost
        self.counts = Counter[str]()
        self.forget()

    def forget(self) -> None:
        """No request is left: the next batch begins as if it were the first, so that a resumed run repeats it."""
        self.hits = self.trials = 0.0
        self.on, self.look = False, LOOK
        self.texts.end_batch()

    # -- when ---------------------------------------------------------------------------------------------------------
    def width(self, slots: Slots, rows: np.ndarray) -> int:
        """Tokens of each of these rows in the next pass; 1: plain decoding."""
        count = len(rows)
        if count > MOST_ROWS or self.cost.best_width(count, 1.0, GAIN) == 1:
            self.on = False
            return 1
        if not self.on:
            self._look_back(slots, rows)
        share = self.hits / self.trials if self.trials else 0.0
        width = self.cost.best_width(count, share, 1.0 if self.on else GAIN)
        self.on = width > 1
        return width

    def _look_back(self, slots: Slots, rows: np.ndarray) -> None:
        """Learn from rows that were decoded plainly what speculation would have given."""
        for slot, count in zip(rows.tolist(), slots.count[rows].tolist(), strict=True):
            index, text = self._text(slots, slot)
            new = count - (len(text) - len(index.prompt))
            if new < self.look:
                continue
            tokens = slots.tokens[slot, count - new : count].tolist()
            index.extend(text, tokens[:-LOOK])
            tokens, before = tokens[-LOOK:], self.hits
            while tokens:
                draft = index.draft(text, WIDEST - 1)
                same = common_start(draft, tokens)
                if same < len(tokens):  # otherwise the draft may go on being right
                    self._note(same, missed=same < len(draft) or not draft)
                index.extend(text, tokens[: same + 1])
                del tokens[: same + 1]
            # Looking costs a microsecond a token: where nothing is found, less often.
            self.look = LOOK if self.hits > before else min(2 * self.look, LOOK_MOST)

    def _note(self, hits: int, *, missed: bool) -> None:
        self.hits = MEMORY * self.hits + hits
        self.trials = MEMORY * self.trials + hits + missed

    def _text(self, slots: Slots, slot: int):
        request = slots.requests[slot]
        assert request is not None
        return self.texts.open_request(request.id, request.prompt_ids)

    def drafts(self, slots: Slots, rows: np.ndarray, width: int) -> list[list[int]]:
        """A draft for each row, of less than `width` tokens; empty where nothing matches."""
        found = []
        for slot, count, limit in zip(
            rows.tolist(), slots.count[rows].tolist(), slots.limit[rows].tolist(), strict=True
        ):
            index, text = self._text(slots, slot)
            index.extend(text, slots.tokens[slot, len(text) - len(index.prompt) : count].tolist())
            # One token more than the draft is sampled, and the row has blocks for no more than its limit.
            found.append(index.draft(text, min(width, limit - count) - 1))
        return found

    def end(self, request: Request, tokens: np.ndarray) -> None:
        """A response has ended: others may go on as it did."""
        self.counts["tokens"] += len(tokens)
        self.texts.end(request.id, request.prompt_ids, tokens, shared=request.parent is None)

    def _count(self, drafted: int, accepted: int, verified: int, passes: int) -> None:
        counts = self.counts
        counts["drafted"] += drafted
        counts["accepted"] += accepted
        counts["verified"] += verified
        counts["passes"] += passes

    def take_counts(self) -> dict[str, float]:
        """Counts since the last call: tokens of ended responses, those from passes with drafts, passes of a row,
        tokens drafted and accepted."""
        taken, self.counts = self.counts, Counter[str]()
        return dict(taken)

    def note_round(self, slots: Slots, rows: np.ndarray, before: np.ndarray, drafted: Drafted) -> None:
        """Learn from a round with drafts; `before` it the rows had so many tokens."""
        counted = zip(drafted.tokens, drafted.passes.tolist(), drafted.tried.tolist(), strict=True)
        for slot, start, (draft, passes, tried) in zip(rows.tolist(), before.tolist(), counted, strict=True):
            sampled = slots.tokens[slot, start : slots.count[slot]].tolist()
            same = common_start(draft, sampled)
            self._note(same, missed=same < min(len(draft), len(sampled)) or not draft)
            self._count(tried, min(same, tried), len(sampled), max(passes, 1))

    # -- the pass -----------------------------------------------------------------------------------------------------
    def verify(
        self,
        rounds: Rounds,
        rows: np.ndarray,
        drafts: list[list[int]],
        stopped_by_text: Callable[[int], bool],
    ) -> None:
        """The next tokens of these rows: as many of each draft as were sampled, and one more."""
        slots, widths = rounds.slots, [len(draft) + 1 for draft in drafts]
        row_T = np.repeat(np.arange(len(rows), dtype=np.int32), widths)
        ahead_T = np.concatenate([np.arange(width) for width in widths])
        ids_T = np.concatenate([[last, *draft] for last, draft in zip(slots.last[rows], drafts, strict=True)])
        drawn_T: dict[int, float] = {}
        if (found := rounds.sample_each(rows[row_T], ids_T, ahead_T)) is not None:
            tokens_T, log_probs_T = found
        else:
            decoder, pool = rounds.decoder, rounds.pool
            positions_T = (slots.length[rows][row_T] + ahead_T).astype(np.int32)
            table = slots.table[rows], slots.starts[rows]
            step = step_tokens([ids_T.astype(np.int64)], [positions_T], [row_T], table, pool.device)
            logits_TV = decoder.logits(decoder.hidden(step, pool.layer, None, pool.routes_PLK))
            tokens_T, log_probs_T, drawn_T = draw(slots, rows[row_T], logits_TV, np.arange(len(ids_T)), ahead_T, ids_T)
        slots.computed += len(ids_T)
        starts = np.cumsum([0, *widths]).tolist()
        histories: dict[tuple[int, ...], int] = {}
        for slot, draft, start in zip(rows.tolist(), drafts, starts, strict=False):
            sampled = tokens_T[start : start + len(draft) + 1].tolist()
            same = common_start(draft, sampled)
            kept = self._place(slots, slot, sampled[: same + 1], log_probs_T[start:], drawn_T, start, stopped_by_text)
            key = (int(slots.history[slot]), int(ids_T[start]), *sampled[: kept - 1])
            slots.history[slot] = histories.setdefault(key, int(slots.next_history[0]) + len(histories))
            self._note(same, missed=same < len(draft) or not draft)
            self._count(len(draft), min(same, kept), kept, 1)
        slots.next_history += len(histories)
        slots.renumber(rows)  # a decoder that runs ahead has not seen these tokens

    def _place(self, slots: Slots, slot: int, sampled: list[int], log_probs, drawn, start: int, stopped_by_text) -> int:
        """Add the sampled tokens to the row, up to one with which it ends; gives how many."""
        stops, by_text, count = slots.stop_sets[slots.stops[slot]], bool(slots.by_text[slot]), int(slots.count[slot])
        kept = 0
        for kept, token in enumerate(sampled, start=1):
            slots.tokens[slot, count + kept - 1] = slots.last[slot] = token
            slots.count[slot] = count + kept
            if token in stops or (by_text and stopped_by_text(slot)):
                break
        slots.log_probs[slot, count : count + kept] = log_probs[:kept]
        slots.length[slot] += kept
        if start in drawn:
            slots.drawn.setdefault(slot, []).extend(drawn[start + place] for place in range(kept))
        return kept


def speculation_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step from the counts of its engines."""
    tokens, drafted, passes = (counts.get(name, 0) for name in ("tokens", "drafted", "passes"))
    return {
        "rollout/speculation_share": counts.get("verified", 0) / max(tokens, 1),
        "rollout/speculation_accepted": counts.get("accepted", 0) / max(drafted, 1),
        "rollout/speculation_tokens": counts.get("verified", 0) / passes if passes else 1.0,
    }
