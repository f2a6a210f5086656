"""The order in which requests are admitted, and the KV blocks that they get.

The KV cache of ended turns is kept for the turns that continue them, and evicted where room is needed. A turn keeps
only the blocks that it has filled. Its continuation takes these over as they are, and computes only what is new:
nothing is copied but a half-full last block that another request needs too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from posttrain.kernels.decode import BLOCK
from posttrain.rollout.base import Request
from posttrain.rollout.native.pool import Pool, blocks_for, blocks_up_to, tokens_in
from posttrain.rollout.native.prompts import NewRow, Piece, Progress, Prompt
from posttrain.rollout.native.states import NO_STATE
from posttrain.texts import common_start

# Tokens that a row is granted at a time where not all rows have room for their whole budgets. A decoder that runs ahead
# learns of an extension up to two rounds (32 tokens) late, and the row stands still meanwhile: grants are longer there.
SEGMENT, SEGMENT_AHEAD = 2 * BLOCK, 16 * BLOCK


@dataclass
class KeptTurn:
    """The tokens that are in the cache, and their blocks."""

    ids: Sequence[int]
    blocks: list[int]
    gap: int
    whole: int  # tokens before any were evicted
    state: int = NO_STATE  # the slot of the recurrent states behind all its tokens

    def common(self, ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, a continuation finds in the cache. A recurrent state is that
        behind all of the turn's tokens: with it, all or none."""
        most = min(len(self.ids), len(ids))
        if tuple(self.ids[:most]) == tuple(ids[:most]):  # a continuation nearly always begins with all of them
            return most if self.state == NO_STATE or most == len(self.ids) else 0
        if self.state != NO_STATE:
            return 0
        return common_start(self.ids, ids)


class KeptTurns:
    """Kept turns by the id of their request, in the order in which they ended."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.turns: dict[Hashable, KeptTurn] = {}
        self.awaited: dict[Hashable, int] = {}  # turns that queued requests continue, and how many; in queue order
        pool.evict, pool.states.evict = self.evict, self.evict_state

    def keep(self, id: Hashable, ids: Sequence[int], blocks: Sequence[int], gap: int, state: int) -> None:
        """Keep these tokens; `blocks` may go on behind them. `state`, that behind the last of them, is the turn's
        from now on."""
        self.release([id])
        self.pool.states.keep(state)
        filled = list(blocks[: blocks_up_to(len(ids), gap)])
        self.pool.keep(filled)
        self.turns[id] = KeptTurn(ids, filled, gap, len(ids), state)

    def release(self, ids: Iterable[Hashable]) -> None:
        for id in ids:
            if (turn := self.turns.pop(id, None)) is not None:
                self.pool.drop(turn.blocks)
                self.pool.states.drop(turn.state)

    def forget(self) -> None:
        self.release(list(self.turns))

    def evict(self, blocks: int) -> None:
        """Let go of kept blocks, until so many are available."""
        # Turns lose their last blocks first: what remains still serves their continuation. Blocks that others use as
        # well would not become free, so they go only where nothing else is left.
        for also_shared in (False, True):
            for id in self._least_useful_first():
                turn = self.turns[id]
                while self.pool.available < blocks and turn.blocks:
                    if not also_shared and self.pool.shared(turn.blocks[-1]):
                        break
                    self.pool.drop([turn.blocks.pop()])
                if (held := tokens_in(len(turn.blocks), turn.gap)) < len(turn.ids):
                    turn.ids = turn.ids[:held]
                    if turn.state != NO_STATE:  # it cannot be cut back to the tokens that are left
                        self.release([id])
                if not turn.blocks:
                    self.release([id])
                if self.pool.available >= blocks:
                    return

    def evict_state(self) -> None:
        """Let go of the turn with a state that is least useful."""
        with_state = (id for id in self._least_useful_first() if self.turns[id].state != NO_STATE)
        if (id := next(with_state, None)) is not None:
            self.release([id])

    def _least_useful_first(self) -> Iterator[Hashable]:
        """Turns that no request continues yet, the one that ended last first: requests are served in the order in
        which they come, so its continuation comes after the others. Then those that are awaited, from the end of the
        queue."""
        # At a quarter of the room 41% of turns found everything in this order, and 35% with the oldest first, awaited
        # or not: in rounds that evicts what the next request continues (scripts/measure_kv_reuse.py, grants of 128).
        yield from [id for id in reversed(self.turns) if id not in self.awaited]
        yield from [id for id in reversed(self.awaited) if id in self.turns]


@dataclass
class _Plan:
    """Where a prompt's blocks come from: `shared` ones of the turn that it continues, with `cached` tokens of which
    `copied` are copied from the block `source`; `new` blocks behind them."""

    gap: int
    shared: list[int] = field(default_factory=list)
    cached: int = 0
    copied: int = 0
    source: int = -1
    new: int = 0
    takes_over: bool = False


class Queue:
    """Waiting requests by prompt, first come, first served.

    A prompt is opened (given blocks) when there are slots for its requests, and only with room for its first row kept
    aside: whatever is open can always start.
    """

    def __init__(self, pool: Pool, segment: int = SEGMENT) -> None:
        self.pool, self.kept, self.segment = pool, KeptTurns(pool), segment
        self.prompts: dict[Hashable, Prompt] = {}  # by their tokens, or by the request of which they are alone
        self.opened: list[Prompt] = []
        self.tight = False  # whether the requests that could run now have no room for all their tokens together
        self.turns = self.continued = 0  # requests that name a parent, and those that found all that it left

    def add(self, request: Request) -> None:
        ids = tuple(request.prompt_ids)
        self.pool.check(len(ids), request.sampling.max_tokens)
        self.turns += request.parent is not None
        if request.parent in self.kept.turns:
            # It writes behind what it takes over, so it shares its prompt with no other request.
            key = _alone(request)
            self.prompts[key] = Prompt(key, ids, deque([request]), parent=request.parent)
            self.kept.awaited[request.parent] = self.kept.awaited.get(request.parent, 0) + 1
        elif (prompt := self.prompts.get(ids)) is not None:
            prompt.waiting.append(request)
        else:
            self.prompts[ids] = Prompt(ids, ids, deque([request]), gap=len(ids))

    def preempt(self, request: Request, progress: Progress, blocks: Sequence[int], gap: int, state: int) -> None:
        """A row leaves its blocks to others, and continues before all that wait."""
        # First in line it is admitted as soon as a row ends, mostly before its own blocks were evicted.
        key, ids = _alone(request), (*request.prompt_ids, *progress.tokens)
        self.kept.keep(key, ids[:-1], blocks, gap, state)
        prompt = Prompt(key, ids, deque([request]), parent=key, progress=progress)
        self.prompts = {key: prompt, **self.prompts}
        self.kept.awaited = {key: 1, **self.kept.awaited}

    def remove(self, wanted: set[Hashable]) -> list[tuple[Request, Progress | None]]:
        """Take these requests out; gives those that were waiting, with what they had made before."""
        gone = []
        for prompt in list(self.prompts.values()):
            gone += [(request, prompt.progress) for request in prompt.waiting if request.id in wanted]
            prompt.waiting = deque(request for request in prompt.waiting if request.id not in wanted)
            if not prompt.waiting:
                self._retire(prompt)
        return gone

    # -- prompts --------------------------------------------------------------------------------------------------
    def open(self, room: int) -> None:
        """Open as many prompts, in order, as there are slots and blocks for."""
        room -= sum(len(prompt.waiting) for prompt in self.opened)
        if room > 0:
            self._reserve(room)
        aside, states = self._set_aside()
        for prompt in self.prompts.values():
            if prompt.blocks:
                continue
            if room <= 0:
                break
            plan = self._plan(prompt)
            first = self._own_blocks(prompt, prompt.waiting[0], plan.gap)[0]
            revived = sum(not self.pool.held[block] for block in plan.shared)  # kept ones, which will be held again
            if not self.pool.fits(aside + revived + plan.new + first, states + 1 + _own_states(prompt)):
                break  # requests start in the order in which they came
            self._open(prompt, plan)
            aside, states, room = aside + first, states + _own_states(prompt), room - len(prompt.waiting)

    def _reserve(self, room: int) -> None:
        """Memory for all that can be admitted, at once."""
        blocks = states = 0
        for prompt in self.prompts.values():
            states += len(prompt.waiting)
            blocks += sum(blocks_for(prompt.tokens_left(request)) for request in prompt.waiting)
            if not prompt.blocks:
                blocks, room = blocks + blocks_for(len(prompt.ids)), room - len(prompt.waiting)
            if room <= 0:
                break
        self.tight = blocks > self.pool.available
        self.pool.reserve(blocks)
        self.pool.states.reserve(states)

    def _plan(self, prompt: Prompt) -> _Plan:
        """What the parent turn has of a prompt's tokens, the last one aside: its logits are wanted."""
        turn = self.kept.turns.get(prompt.parent)
        cached = 0 if turn is None else turn.common(prompt.ids[:-1])
        if turn is None or not cached:
            return _Plan(prompt.gap, new=blocks_up_to(len(prompt.ids), prompt.gap))
        # A turn that differs within the first prompt has no gap to inherit: its blocks are full up to there.
        gap = turn.gap if cached >= turn.gap else prompt.gap
        full = cached // BLOCK if cached < turn.gap else blocks_for(turn.gap) + (cached - turn.gap) // BLOCK
        partial = (cached if cached < turn.gap else cached - turn.gap) % BLOCK
        plan = _Plan(gap, turn.blocks[:full], cached, takes_over=self.kept.awaited.get(prompt.parent, 0) <= 1)
        if partial and plan.takes_over and not self.pool.shared(turn.blocks[full]):
            plan.shared.append(turn.blocks[full])  # no other turn reads it: the new tokens go behind the old ones
        elif partial:
            plan.copied, plan.source = partial, turn.blocks[full]
        plan.new = blocks_up_to(len(prompt.ids), gap) - len(plan.shared)
        return plan

    def _open(self, prompt: Prompt, plan: _Plan) -> None:
        source, turn = [plan.source] if plan.copied else [], self.kept.turns.get(prompt.parent)
        self.pool.hold([*plan.shared, *source])  # before others are evicted
        prompt.gap, prompt.computed = plan.gap, plan.cached
        prompt.state = self._first_state(prompt, plan)
        prompt.blocks = [*plan.shared, *self.pool.take(plan.new)]
        if plan.copied:
            self.pool.copy(plan.source, prompt.blocks[len(plan.shared)], plan.copied)
        self.pool.give_back(source)
        if turn is not None and prompt.progress is None:
            self.continued += plan.cached == min(turn.whole, len(prompt.ids) - 1)
        if plan.takes_over:
            self.kept.release([prompt.parent])
        self._stop_awaiting(prompt)
        self.opened.append(prompt)

    def _first_state(self, prompt: Prompt, plan: _Plan) -> int:
        """A slot for the prompt's states, with those of the turn that it continues."""
        states, turn = self.pool.states, self.kept.turns.get(prompt.parent)
        if turn is None or not plan.cached or turn.state == NO_STATE:
            return states.take()
        state, turn.state = turn.state, NO_STATE  # now it cannot be evicted
        states.hold(state)
        if plan.takes_over or not states.fits(1):
            self.kept.release([prompt.parent])
            return state
        own = states.copied(state)
        states.keep(state)
        turn.state = state
        return own

    def _stop_awaiting(self, prompt: Prompt) -> None:
        if prompt.parent in self.kept.awaited:
            self.kept.awaited[prompt.parent] -= 1
            if not self.kept.awaited[prompt.parent]:
                del self.kept.awaited[prompt.parent]

    def next_pieces(self, budget: int) -> list[Piece]:
        """(prompt, start, end) of what this step computes of open prompts."""
        pieces = []
        for prompt in self.opened:
            if not prompt.ready and budget > 0:
                end = min(len(prompt.ids), prompt.computed + budget)
                pieces.append((prompt, prompt.computed, end))
                budget -= end - prompt.computed
        return pieces

    def unfinished(self) -> bool:
        """Whether there is more to compute of open prompts."""
        return any(not prompt.ready for prompt in self.opened)

    # -- rows -----------------------------------------------------------------------------------------------------
    def start(self, room: int) -> Iterator[NewRow]:
        """Requests that can run now."""
        aside, states = self._set_aside()
        for prompt in [prompt for prompt in self.opened if prompt.ready]:
            while prompt.waiting and room > 0:
                own, granted = self._own_blocks(prompt, prompt.waiting[0], prompt.gap)
                own_state = _own_states(prompt)
                others, other_states = (aside, states) if prompt.running else (aside - own, states - own_state)
                if not self.pool.fits(others + own, other_states + own_state):
                    break
                self.pool.hold(prompt.blocks)
                aside, states, prompt.running, room = others, other_states, prompt.running + 1, room - 1
                if own_state:
                    state = self.pool.states.copied(prompt.state)
                else:  # no other row starts from it
                    state, prompt.state = prompt.state, NO_STATE
                blocks = [*prompt.blocks, *self.pool.take(own)]
                yield NewRow(prompt.waiting.popleft(), prompt, blocks, state, granted)
            if not prompt.waiting:
                self._retire(prompt)

    def _own_blocks(self, prompt: Prompt, request: Request, gap: int) -> tuple[int, int]:
        """(blocks behind those of its prompt, tokens) that a row is granted when it starts."""
        granted = prompt.tokens_left(request)
        # Budgets are far longer than most turns. Whole reservations would evict turns for tokens that never come.
        if self.tight:
            granted = min(granted, self.segment)
        return blocks_up_to(len(prompt.ids) + granted, gap) - blocks_up_to(len(prompt.ids), gap), granted

    def _set_aside(self) -> tuple[int, int]:
        """Blocks, and slots for states, that the first rows of open prompts must still find."""
        waiting = [prompt for prompt in self.opened if prompt.waiting and not prompt.running]
        blocks = sum(self._own_blocks(prompt, prompt.waiting[0], prompt.gap)[0] for prompt in waiting)
        return blocks, sum(map(_own_states, waiting))

    def extend(self, tokens: int, gap: int, blocks: list[int], left: int) -> int:
        """Grant a row further tokens behind its first `tokens`, of which `left` are allowed: how many, or 0 where there
        is no room."""
        granted = min(left, self.segment)
        more = blocks_up_to(tokens + granted, gap) - len(blocks)
        if not self.pool.fits(self._set_aside()[0] + more):
            return 0
        blocks += self.pool.take(more)
        return granted

    def row_done(self, prompt: Prompt, blocks: Sequence[int], state: int) -> None:
        """A row has ended, or was preempted."""
        self.pool.give_back(blocks)
        self.pool.states.give_back(state)
        prompt.running -= 1

    def release(self, ids: Iterable[Hashable]) -> None:
        self.kept.release(ids)

    # -- ends -----------------------------------------------------------------------------------------------------
    def _retire(self, prompt: Prompt) -> None:
        """No request waits for this prompt any more. Running rows have holds of their own on its blocks."""
        del self.prompts[prompt.key]
        if prompt in self.opened:
            self.opened.remove(prompt)
        else:
            self._stop_awaiting(prompt)
            if prompt.progress is not None:
                self.kept.release([prompt.parent])
        self._close(prompt)

    def _close(self, prompt: Prompt) -> None:
        self.pool.give_back(prompt.blocks)
        self.pool.states.give_back(prompt.state)
        prompt.blocks, prompt.state = [], NO_STATE

    def forget(self) -> None:
        """Keys and values are no longer valid: waiting requests need their prompts anew; running rows go on with
        theirs."""
        self.kept.forget()
        self.kept.awaited = {}
        self.opened = []
        for key, prompt in list(self.prompts.items()):
            self._close(prompt)
            gap = len(prompt.ids) if key == prompt.ids else 0
            self.prompts[key] = Prompt(key, prompt.ids, prompt.waiting, gap, progress=prompt.progress)


def _own_states(prompt: Prompt) -> int:
    """Slots that the next row of a prompt takes: the last one continues with the prompt's own."""
    return int(len(prompt.waiting) > 1)


def _alone(request: Request) -> Hashable:
    return ("alone", request.id)
