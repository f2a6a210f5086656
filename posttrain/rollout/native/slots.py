"""The rows that are running, as arrays: a step reads a column of all of them in one indexing operation.

A slot is a place for one row; the next request takes the slot of a finished row at once.
"""

from __future__ import annotations

import numpy as np

from posttrain.kernels.decode import FAR
from posttrain.rollout.base import Output, Request, Sampling
from posttrain.rollout.native.pool import block_starts, blocks_up_to
from posttrain.rollout.native.prompts import NewRow, Progress, Prompt
from posttrain.rollout.native.states import NO_STATE

_COLUMNS = {
    "length": np.int32,  # tokens in the cache: where the next one is written
    "last": np.int64,  # the newest token, not yet in the cache
    "count": np.int64,  # tokens generated
    "limit": np.int64,  # tokens that it has blocks for
    "state": np.int64,  # the slot of its recurrent states
    "gap": np.int32,  # where the blocks behind its first prompt begin
    "seed": np.uint64,
    "temperature": np.float32,
    "greedy": np.uint8,
    "special": bool,  # sampled with filters or a penalty
    "by_text": bool,  # ended by a stop string
    "stops": np.int32,  # which set of stop tokens
    "history": np.int64,  # the same for rows with the same prompt and the same tokens up to the newest
    "number": np.int64,  # of the row among all that there ever were
    "under_way": np.int64,  # tokens that the decoder may have made, beyond those that are known here
}
_BY_SAMPLING = ("temperature", "greedy", "special", "by_text", "stops")


class Slots:
    """Columns over slots; `active` are the slots in use, in the order in which their rows were admitted."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.columns = {name: np.zeros(0, kind) for name, kind in _COLUMNS.items()}
        self.table = np.zeros((0, 1), np.int32)
        self.starts = np.zeros((0, 1), np.int32)
        self.tokens = np.zeros((0, 1), np.int64)
        self.log_probs = np.zeros((0, 1), np.float32)
        self.requests: list[Request | None] = []
        self.prompts: list[Prompt | None] = []
        self.blocks: list[list[int]] = []
        self.spans: list[list[tuple[int, int]]] = []
        self.lists: list[list[int]] = []  # what was read of their tokens
        self.drawn: dict[int, list[float]] = {}  # of special rows: log-probs of what they were sampled from
        self.stop_sets: list[tuple[int, ...]] = []
        self.free: list[int] = []
        self.active = np.zeros(0, np.int64)
        self.next_history = np.zeros(1, np.int64)
        self.started = 0  # rows that there ever were
        self.computed = 0  # tokens of responses that went through the model

    def __getattr__(self, name: str) -> np.ndarray:
        return self.__dict__["columns"][name]

    @property
    def width(self) -> int:
        """Blocks in a row of the table."""
        return self.table.shape[1]

    @property
    def room(self) -> int:
        return self.most - len(self.active)

    def plain(self, slots: np.ndarray) -> bool:
        """Whether these rows need nothing but their next tokens, plainly sampled."""
        return not (self.special[slots].any() or self.by_text[slots].any())

    def add(self, rows: list[NewRow]) -> np.ndarray:
        """Put rows into free slots."""
        if not rows:
            return np.zeros(0, np.int64)
        self._grow(len(rows))
        # Wide enough for whole budgets, though rows may be granted a part: graphs are captured over one width.
        budgets = [(len(r.prompt.ids) + r.prompt.tokens_left(r.request), r.prompt.gap) for r in rows]
        self._widen(max(blocks_up_to(*b) for b in budgets), max(r.request.sampling.max_tokens for r in rows))
        slots = np.asarray([self.free.pop() for _ in rows])
        for slot, row in zip(slots.tolist(), rows, strict=True):
            self.requests[slot], self.prompts[slot], self.blocks[slot] = row.request, row.prompt, row.blocks
            self.spans[slot], self.lists[slot] = [], []
            if row.prompt.history < 0:
                row.prompt.history = int(self.next_history[0])
                self.next_history += 1
        self._set_tables(slots)
        self.length[slots] = [len(row.prompt.ids) for row in rows]
        self.gap[slots] = [row.prompt.gap for row in rows]
        self.state[slots] = [row.state for row in rows]
        self.history[slots] = [row.prompt.history for row in rows]
        self.seed[slots] = np.array([row.request.seed & (2**64 - 1) for row in rows], np.uint64)
        self.last[slots] = self.count[slots] = self.under_way[slots] = 0
        kinds: dict[int, tuple] = {}  # what follows from the sampling, which most rows share
        for row in rows:
            if id(row.request.sampling) not in kinds:
                kinds[id(row.request.sampling)] = self._kind(row.request.sampling)
        columns = zip(*[kinds[id(row.request.sampling)] for row in rows], strict=True)
        for name, column in zip(_BY_SAMPLING, columns, strict=True):
            self.columns[name][slots] = column
        for slot, row in zip(slots.tolist(), rows, strict=True):
            if row.prompt.progress is not None:
                self._restore(slot, row.prompt.progress)
        self.limit[slots] = self.count[slots] + [row.granted for row in rows]
        self.renumber(slots)
        return slots

    def _set_tables(self, slots: np.ndarray) -> None:
        """Write the blocks of these rows into the table."""
        self.table[slots] = [_padded(self.blocks[slot], 0, self.width) for slot in slots]
        starts: dict[tuple[int, int], list[int]] = {}  # by number of blocks and gap, which most rows share
        for slot in slots:
            kind = len(self.blocks[slot]), self.prompts[slot].gap  # pyright: ignore
            if kind not in starts:
                starts[kind] = _padded(block_starts(*kind), FAR, self.width)
            self.starts[slot] = starts[kind]

    def renumber(self, slots: np.ndarray) -> None:
        """New numbers: a decoder that runs ahead reads rows anew by these."""
        self.number[slots] = np.arange(self.started, self.started + len(slots))
        self.started += len(slots)

    def extend(self, slot: int, granted: int) -> None:
        """The row has blocks for so many tokens more."""
        self.limit[slot] += granted
        self._set_tables(np.array([slot]))
        self.renumber(np.array([slot]))

    def save(self, slot: int, version: int) -> Progress:
        """What the row has made; `version` made what is new."""
        self.note_version([slot], version)
        count = self.count[slot]
        return Progress(
            self.written(slot), self.log_probs[slot, :count].copy(), self.drawn.get(slot), list(self.spans[slot])
        )

    def _restore(self, slot: int, progress: Progress) -> None:
        count = self.count[slot] = len(progress.tokens)
        self.tokens[slot, :count], self.log_probs[slot, :count] = progress.tokens, progress.log_probs
        self.spans[slot] = progress.spans
        if progress.drawn is not None:
            self.drawn[slot] = progress.drawn

    def update_histories(self, slots: np.ndarray) -> None:
        """Add the newest tokens of these rows to their histories."""
        if len(slots):
            last = self.last[slots]
            _, number = np.unique(self.history[slots] * (last.max() + 1) + last, return_inverse=True)
            self.history[slots] = self.next_history + number
            self.next_history += len(slots)

    def take_state(self, slot: int) -> int:
        """The slot of the row's recurrent states, which are no longer the row's."""
        state, self.state[slot] = int(self.state[slot]), NO_STATE
        return state

    def drop(self, slot: int) -> None:
        self.requests[slot] = self.prompts[slot] = None
        self.drawn.pop(slot, None)
        self.lists[slot] = []  # what was read is the output's
        self.free.append(slot)

    def written(self, slot: int) -> list[int]:
        """The response so far."""
        return self.tokens[slot, : self.count[slot]].tolist()

    def read(self, slots: list[int]) -> None:
        """Make lists of the tokens that are known of these rows."""
        # Lists take longest of all that is done when a row ends. Most of each is made while the device computes.
        for slot, count in zip(slots, self.count[slots].tolist(), strict=True):
            ids = self.lists[slot]
            ids += self.tokens[slot, len(ids) : count].tolist()

    def _kind(self, sampling: Sampling) -> tuple:
        """A row's values in the columns `_BY_SAMPLING`."""
        if sampling.stop_token_ids not in self.stop_sets:
            self.stop_sets.append(sampling.stop_token_ids)
        return (
            1.0 if sampling.greedy else sampling.temperature,
            sampling.greedy,
            not sampling.plain,
            bool(sampling.stop),
            self.stop_sets.index(sampling.stop_token_ids),
        )

    def stopped(self, slots: np.ndarray) -> np.ndarray:
        """Which of these rows' newest tokens are among their stop tokens."""
        hit = np.zeros(len(slots), bool)
        last, kind = self.last[slots], self.stops[slots]
        for number in np.unique(kind):
            ids = self.stop_sets[number]
            if ids:
                hit |= (kind == number) & np.isin(last, ids)
        return hit

    def note_version(self, slots: list[int], version: int) -> None:
        """Tokens that these rows generated since the last note were made by `version`."""
        for slot, count in zip(slots, self.count[slots].tolist(), strict=True):
            spans = self.spans[slot]
            new = count - sum(length for _, length in spans)
            if not new:
                continue
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1] + new)
            else:
                spans.append((version, new))

    def outputs(self, ended: dict[int, str], version: int) -> list[Output]:
        """What these rows have made; each with the reason why it ended."""
        slots = list(ended)
        self.read(slots)
        self.note_version(slots, version)
        log_probs = self.log_probs[slots, : self.count[slots].max()]
        found = []
        for slot, reason, values in zip(slots, ended.values(), log_probs, strict=True):
            request, ids = self.requests[slot], self.lists[slot]
            assert request is not None
            found.append(Output(request.id, ids, values[: len(ids)], reason, self.spans[slot], self.drawn.get(slot)))
        return found

    def _grow(self, more: int) -> None:
        """Have this many free slots."""
        if more <= len(self.free):
            return
        old = len(self.requests)
        size = min(self.most, max(old + more - len(self.free), 2 * old))
        for name, column in self.columns.items():
            self.columns[name] = np.concatenate([column, np.zeros(size - old, column.dtype)])
        for name in ("table", "starts", "tokens", "log_probs"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((size - old, array.shape[1]), array.dtype)]))
        for rows in (self.requests, self.prompts, self.blocks, self.spans, self.lists):
            rows.extend([None] * (size - old))  # pyright: ignore
        self.free.extend(range(size - 1, old - 1, -1))

    def _widen(self, blocks: int, tokens: int) -> None:
        for name, width in (("table", blocks), ("starts", blocks), ("tokens", tokens), ("log_probs", tokens)):
            array = getattr(self, name)
            if array.shape[1] < width:
                wide = np.full((len(array), width), FAR if name == "starts" else 0, array.dtype)
                wide[:, : array.shape[1]] = array
                setattr(self, name, wide)


def _padded(values: list[int], fill: int, width: int) -> list[int]:
    return values + [fill] * (width - len(values))
